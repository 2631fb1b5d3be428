"use strict";
const $ = (id) => document.getElementById(id);
let key = sessionStorage.getItem("key") || "", authenticate = true, chosen = null, upload = null, figures = null, stream = null, shown = null;

// text is only ever put in as text, never as markup
function make(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
const several = (count, one, many) => `${count} ${count === 1 ? one : many}`;
const percent = (value) => (value == null ? "–" : `${(100 * value).toFixed(1)} %`);
const button = (text, action, label) => { const made = make("button", text, label ? { "aria-label": label } : {}); made.type = "button"; made.onclick = () => guard(action); return made; };
async function guard(action) { $("message").textContent = ""; try { await action(); } catch (error) { $("message").textContent = error.message; } }
const headers = () => (authenticate ? { Authorization: `Bearer ${key}` } : {});
async function call(method, path, body, type = "application/json") {
  const options = { method, headers: headers() };
  if (body instanceof FormData) options.body = body;
  else if (body !== undefined) { options.body = type === "application/json" ? JSON.stringify(body) : body; options.headers["Content-Type"] = type; }
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({ error: answer.statusText }));
  if (answer.status === 401) { $("work").hidden = true; $("sign-in").hidden = false; }
  throw new Error(problem.error);
}
const json = async (...request) => (await call(...request)).json();
const at = (path = "") => `/api/classifiers/${encodeURIComponent(chosen)}${path}`;

async function begin() {
  const about = await (await fetch("/api/service")).json();
  authenticate = about.authenticate;
  if (!$("language").options.length) for (const code of about.languages) $("language").append(make("option", code, { value: code }));
  if (authenticate && !key) { $("sign-in").hidden = false; $("key").focus(); return; }
  await list();
  $("sign-in").hidden = true; $("work").hidden = false;
  await keys(); await usage();
}
$("key-form").onsubmit = (event) => { event.preventDefault(); key = $("key").value.trim(); guard(async () => { await begin(); sessionStorage.setItem("key", key); }); };

// ---- upload
async function check(file) {
  upload = file; $("create").hidden = true; $("checked").replaceChildren(make("p", "Checking…"));
  const found = await json("POST", "/api/validate", file, "text/csv");
  const parts = [make("p", found.valid ? `${found.rows} rows in ${found.classes.length} classes, no mistakes.` : `${several(found.mistake_count, "mistake", "mistakes")}:`, { class: found.valid ? "good" : "bad" })];
  if (found.mistakes.length) parts.push(table(["Line", "Column", "What is wrong"], found.mistakes.map((one) => [one.line, one.column, `${one.kind}: ${one.message}`])));
  if (found.duplicate_count) parts.push(make("p", `${several(found.duplicate_count, "row repeats", "rows repeat")} an earlier one: ${found.duplicates.slice(0, 10).map((one) => `line ${one.line} is line ${one.first_line}`).join("; ")}`));
  if (found.conflict_count) parts.push(make("p", `${several(found.conflict_count, "row has the text of an earlier one, but other classes", "rows have the text of an earlier one, but other classes")}: ${found.conflicts.slice(0, 10).map((one) => `lines ${one.first_line} and ${one.line}`).join("; ")}`));
  if (found.classes.length) {
    const balance = table(["Class", "Rows", "Share"], found.classes.map((one) => [one.class_name, one.rows, ""]));
    const most = found.classes[0].rows;
    balance.querySelectorAll("tbody tr").forEach((row, index) => row.lastChild.append(make("meter", undefined, { min: 0, max: most, value: found.classes[index].rows, "aria-label": `${found.classes[index].rows} rows` })));
    parts.push(balance);
  }
  $("checked").replaceChildren(...parts);
  if (found.valid) { $("create").hidden = false; $("name").value ||= file.name.replace(/\.csv$/i, "").slice(0, 100); }
}
function table(heads, rows) {
  const made = make("table"), head = make("tr");
  head.append(...heads.map((text) => make("th", text, { scope: "col" })));
  made.createTHead().append(head);
  const body = made.createTBody();
  for (const row of rows) body.append(line(row));
  const around = make("div", undefined, { class: "scroll", tabindex: 0 });
  around.append(made);
  return around;
}
function line(cells) { const row = make("tr"); row.append(...cells.map((cell) => { if (!(cell instanceof Node)) return make("td", cell); const made = make("td"); made.append(cell); return made; })); return row; }
$("file").onchange = () => { if ($("file").files[0]) guard(() => check($("file").files[0])); };
for (const name of ["dragover", "dragleave", "drop"]) $("drop").addEventListener(name, (event) => {
  event.preventDefault(); $("drop").classList.toggle("over", name === "dragover");
  if (name === "drop" && event.dataTransfer.files[0]) guard(() => check(event.dataTransfer.files[0]));
});
$("create").onsubmit = (event) => { event.preventDefault(); guard(async () => {
  const form = new FormData();
  form.append("training_metadata", JSON.stringify({ language: $("language").value, name: $("name").value, out_of_scope: $("scope").checked }));
  form.append("training_data", upload);
  const made = await json("POST", "/v1/classifiers", form);
  $("checked").replaceChildren(); $("create").hidden = true; $("file").value = ""; $("name").value = ""; $("scope").checked = false;
  await list(); await open(made.classifier_id);
}); };

// ---- list
async function list() {
  const found = (await json("GET", "/api/classifiers")).classifiers, rows = [];
  for (const one of found.reverse()) {
    const actions = make("span"), named = `${one.name || one.classifier_id} version ${one.version}`;
    actions.append(button("Open", () => open(one.classifier_id), `Open ${named}`));
    if (one.status === "Available" && one.name && !one.current) actions.append(button("Use this version", async () => { await call("PUT", `/api/names/${encodeURIComponent(one.name)}`, { classifier_id: one.classifier_id }); await list(); }, `Use ${named}`));
    if (one.status === "Failed") actions.append(button("Retry", async () => { await call("POST", `/api/classifiers/${one.classifier_id}/retry`); await list(); await open(one.classifier_id); }, `Retry ${named}`));
    actions.append(button("Delete", async () => {
      if (!confirm(`Delete ${named} with its data?`)) return;
      await call("DELETE", `/v1/classifiers/${one.classifier_id}`);
      if (chosen === one.classifier_id) { chosen = null; $("detail").hidden = true; }
      await list();
    }, `Delete ${named}`));
    rows.push(line([one.name || one.classifier_id, `${one.version}${one.current ? " (current)" : ""}`, one.queue_position > 0 ? `Waiting, place ${one.queue_position}` : one.status, one.rows, one.class_count, percent(one.figures.accuracy), percent(one.figures.macro_f1), actions]));
  }
  $("list").tBodies[0].replaceChildren(...rows);
  $("none").hidden = rows.length > 0; $("list").hidden = !rows.length;
}

// ---- one classifier
async function open(id) {
  chosen = id; figures = null; for (const part of ["results", "summary", "trying"]) $(part).hidden = true;
  if (stream) stream.abort();
  for (const curve of ["loss-curve", "accuracy-curve"]) if (window.Plotly) Plotly.purge($(curve));
  const one = shown = await json("GET", at());
  $("detail").hidden = false; $("wrong").replaceChildren(); $("answer").replaceChildren();
  $("detail-title").textContent = `${one.name || id}, version ${one.version}`;
  $("detail-title").focus();
  const points = [];
  stream = new AbortController();
  const mine = stream;
  try { await events(at("/events"), mine.signal, (kind, data) => { if (kind === "progress") { points.push(data); schedule(points); } else state(data, points); }); }
  catch (error) { if (error.name !== "AbortError") throw error; return; }
  draw(points); await list();
  if ((await json("GET", at())).status === "Available" && chosen === id) await results();
}
async function events(path, signal, handle) {
  const answer = await fetch(path, { headers: headers(), signal });
  if (!answer.ok) throw new Error(`The progress cannot be read (${answer.status})`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) { const [, kind, data] = block.match(/^event: (\w+)\ndata: (.*)$/s) || []; if (kind) handle(kind, JSON.parse(data)); }
  }
}
function state(now, points) {
  const training = now.status === "Training";
  $("training-actions").hidden = !training; $("stop").hidden = now.queue_position !== 0; $("bar").hidden = !training;
  $("state").className = now.status === "Failed" ? "bad" : now.status === "Available" ? "good" : "";
  $("state").textContent = now.queue_position > 0 ? `Waiting, place ${now.queue_position} in the queue` : now.status + (now.status_description ? `: ${now.status_description}` : "");
}
const phases = { reading: "reading the rows", linear: "the linear model is there, workers for the convolution start", measuring: "measuring on held-out rows" };
let pending = 0;
function schedule(points) { if (!pending) pending = setTimeout(() => { pending = 0; draw(points); }, 300); }
function draw(points) {
  const seen = points.filter((one) => one.metrics), last = points[points.length - 1];
  if (last && !$("bar").hidden) $("state").textContent = last.phase === "training" ? `Training for ${last.seconds.toFixed(0)} s, ${last.samples} samples${last.seconds_left != null ? `; at most ${Math.ceil(last.seconds_left)} s left` : ""}` : `Training: ${phases[last.phase] || last.phase}`;
  if (last && !$("bar").hidden && ["linear", "training"].includes(last.phase)) { $("trying").hidden = false; $("early").hidden = false; }
  if (last && last.share != null) $("bar").value = last.share; else $("bar").removeAttribute("value");
  if (!window.Plotly || !seen.length) { for (const id of ["loss-curve", "accuracy-curve"]) if (window.Plotly) Plotly.purge($(id)); return; }
  const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
  const x = seen.map((one) => one.seconds);
  const axis = (title) => ({ title: { text: title }, gridcolor: color("--line"), zerolinecolor: color("--line"), rangemode: "tozero" });
  const layout = (title, more) => ({ title: { text: title, font: { size: 14 } }, xaxis: axis("seconds"), yaxis: { ...axis(""), ...more }, margin: { l: 48, r: 12, t: 36, b: 40 }, height: 240, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: color("--text") }, showlegend: false });
  const options = { displayModeBar: false, responsive: true };
  const curve = (y, name, of, dash = "solid") => ({ x, y, name, mode: seen.length < 30 ? "lines+markers" : "lines", line: { color: color(of), dash } });
  Plotly.react($("loss-curve"), [curve(seen.map((one) => one.metrics.loss), "held-out rows", "--accent"), curve(seen.map((one) => one.training_loss), "training", "--soft", "dot")], { ...layout("Loss on held-out rows, and in training (dotted)") }, options);
  Plotly.react($("accuracy-curve"), [curve(seen.map((one) => 100 * (1 - one.metrics.error)), "held-out rows", "--good")], layout("Accuracy on held-out rows, %", { range: [0, 101] }), options);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (chosen) guard(() => open(chosen)); });
$("stop").onclick = () => guard(() => call("POST", at("/stop")));
$("cancel").onclick = () => guard(() => call("POST", at("/cancel")));

async function results() {
  figures = await json("GET", at("/figures"));
  for (const part of ["results", "summary", "trying"]) $(part).hidden = false;
  $("early").hidden = true;
  $("summary").replaceChildren(...[["Accuracy", percent(figures.accuracy)], ["Macro-F1", percent(figures.macro_f1)], ["Held-out rows", figures.held_out_rows], ["Trained in", `${figures.seconds.toFixed(1)} s`]].map(([name, value]) => { const made = make("div"); made.append(make("dt", name), make("dd", value)); return made; }));
  const others = shown.name ? (await json("GET", "/api/classifiers")).classifiers.filter((one) => one.name === shown.name && one.status === "Available" && one.classifier_id !== chosen) : [];
  $("comparing").hidden = !others.length;
  $("other").replaceChildren(make("option", "nothing", { value: "" }), ...others.map((one) => make("option", `version ${one.version}`, { value: one.classifier_id })));
  await compare(); matrix(); threshold();
}
// versions are measured on different rows unless their uploads are the same
async function compare() {
  const id = $("other").value, other = id ? await json("GET", `/api/classifiers/${encodeURIComponent(id)}/figures`) : null, name = $("other").selectedOptions[0].textContent;
  const earlier = new Map((other ? other.classes : []).map((one) => [one.class_name, one.f1]));
  $("other-head").hidden = !other; $("other-head").textContent = `F1 of ${name}`;
  $("compared").textContent = other ? `Accuracy ${percent(figures.accuracy)} here, ${percent(other.accuracy)} in ${name}; macro-F1 ${percent(figures.macro_f1)} here, ${percent(other.macro_f1)} in ${name}; each on the rows held out of its own upload.` : "";
  $("classes").tBodies[0].replaceChildren(...figures.classes.map((one) => line([one.class_name, percent(one.precision), percent(one.recall), percent(one.f1), ...(other ? [percent(earlier.get(one.class_name))] : []), one.rows])));
}
$("other").onchange = () => guard(compare);
function matrix() {
  const wrong = figures.confusion.filter((one) => one.actual !== one.found);
  let names = figures.classes.map((one) => one.class_name);
  const faults = new Map(names.map((name) => [name, wrong.reduce((sum, one) => sum + (one.actual === name || one.found === name ? one.rows : 0), 0)]));
  $("confusion-part").hidden = names.length <= 30;
  if (names.length > 30) names = [...names].sort((a, b) => faults.get(b) - faults.get(a)).slice(0, 30);
  const counts = new Map(figures.confusion.map((one) => [JSON.stringify([one.actual, one.found]), one.rows]));
  const head = make("tr"); head.append(make("td"), ...names.map((name) => make("th", name, { scope: "col" })));
  const rows = names.map((actual) => {
    const row = make("tr"); row.append(make("th", actual, { scope: "row" }));
    for (const found of names) {
      const count = counts.get(JSON.stringify([actual, found])) || 0, cell = make("td", undefined, { class: actual === found ? "right" : "wrong" });
      if (count && actual !== found) cell.append(button(count, () => mistakes(actual, found), `${count} rows of ${actual} answered ${found}`)); else cell.textContent = count || "·";
      row.append(cell);
    }
    return row;
  });
  $("confusion").replaceChildren(head, ...rows);
}
async function mistakes(actual, found) {
  const { rows } = await json("GET", at(`/misclassified?${new URLSearchParams({ actual, found })}`));
  $("wrong").replaceChildren(make("h3", `${actual} answered as ${found}`), table(["Line", "Text", "Confidence"], rows.map((row) => [row.line, row.text, percent(row.confidence)])));
}
function threshold() {
  if (!figures) return;
  const limit = Number($("threshold").value), kept = figures.confidences.filter(([confidence]) => confidence >= limit), right = kept.filter(([, is]) => is).length;
  $("threshold-value").textContent = limit.toFixed(2);
  $("threshold-text").textContent = figures.confidences.length ? `${kept.length} of ${figures.confidences.length} held-out rows are answered (${percent(kept.length / figures.confidences.length)}); ${kept.length ? percent(right / kept.length) : "none"} of the answers are right.` : "No rows were held out.";
  $("answer").querySelectorAll("[data-confidence]").forEach((one) => { one.textContent = Number(one.dataset.confidence) >= limit ? "" : "below the threshold"; });
}
$("threshold").oninput = threshold;
$("try").onsubmit = (event) => { event.preventDefault(); guard(async () => {
  const [found] = (await json("POST", at("/classify_batch"), { collection: [{ text: $("try-text").value }] })).collection;
  const answers = table(["Class", "Confidence", ""], found.classes.map((one, index) => [one.class_name, percent(one.confidence), index ? "" : make("span", "", { "data-confidence": one.confidence })]));
  $("answer").replaceChildren(...(found.out_of_scope ? [make("p", "Out of scope: this is unlike all rows of the upload.", { class: "bad" })] : []), answers); threshold();
}); };
document.querySelectorAll("[data-copy]").forEach((one) => { one.type = "button"; one.onclick = () => guard(async () => {
  const text = $("try-text").value || "your text", quoted = JSON.stringify(text), id = JSON.stringify(chosen), url = JSON.stringify(location.origin);
  const shell = (value) => `'${value.replaceAll("'", "'\\''")}'`;
  const samples = {
    curl: `curl ${authenticate ? "-u apikey:YOUR_KEY " : ""}-H 'Content-Type: application/json' -d ${shell(JSON.stringify({ text }))} ${shell(`${location.origin}/v1/classifiers/${chosen}/classify`)}`,
    python: `from ibm_watson import NaturalLanguageClassifierV1\nfrom ibm_cloud_sdk_core.authenticators import BasicAuthenticator, NoAuthAuthenticator\n\nservice = NaturalLanguageClassifierV1(authenticator=${authenticate ? 'BasicAuthenticator("apikey", "YOUR_KEY")' : "NoAuthAuthenticator()"})\nservice.set_service_url(${url})\nprint(service.classify(${id}, ${quoted}).get_result())`,
    node: `const NaturalLanguageClassifierV1 = require("ibm-watson/natural-language-classifier/v1");\nconst { BasicAuthenticator, NoAuthAuthenticator } = require("ibm-watson/auth");\n\nconst service = new NaturalLanguageClassifierV1({ authenticator: ${authenticate ? 'new BasicAuthenticator({ username: "apikey", password: "YOUR_KEY" })' : "new NoAuthAuthenticator()"}, serviceUrl: ${url} });\nservice.classify({ classifierId: ${id}, text: ${quoted} }).then((answer) => console.log(answer.result));`,
  };
  await navigator.clipboard.writeText(samples[one.dataset.copy]); $("copied").textContent = `Copied as ${one.textContent}.`;
}); });
document.querySelectorAll("[data-download]").forEach((one) => { one.type = "button"; one.onclick = () => guard(async () => {
  const answer = await call("GET", at(`/${one.dataset.download}`)), link = make("a");
  link.href = URL.createObjectURL(await answer.blob()); link.download = (answer.headers.get("Content-Disposition") || "").match(/filename="(.*)"/)?.[1] || "download"; link.click();
  URL.revokeObjectURL(link.href);
}); });

// ---- keys
async function keys() {
  const found = (await json("GET", "/api/keys")).keys;
  $("keys").replaceChildren(...found.map((one) => { const made = make("li", `${one.name || "unnamed"} (${one.id}, ${one.created.slice(0, 10)}) `); made.append(button("Revoke", async () => { if (confirm("Revoke this key?")) { await call("DELETE", `/api/keys/${one.id}`); await keys(); } }, `Revoke ${one.name || one.id}`)); return made; }));
}
$("new-key").onsubmit = (event) => { event.preventDefault(); guard(async () => {
  const made = await json("POST", "/api/keys", { name: $("key-name").value });
  $("shown-key").replaceChildren("Copy it now, it is not shown again: ", make("code", made.key)); $("key-name").value = ""; await keys();
}); };
async function usage() {
  const found = (await json("GET", "/api/usage")).usage, what = { create: "trainings", classify: "texts classified" };
  $("usage").replaceChildren(found.length ? table(["Day", "What", "Number"], found.map((one) => [one.day, what[one.kind] || one.kind, one.count])) : make("p", "Nothing yet.", { class: "hint" }));
}
$("usage-refresh").onclick = () => guard(usage);
guard(begin);
