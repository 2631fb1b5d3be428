"""The service: uploads, the v1 interface with IBM's own clients, the page in a browser, and what survives a kill."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from tether.service.access import Access
from tether.service.database import Database
from tether.service.problems import Problem
from tether.service.settings import Settings
from tether.service.store import AVAILABLE, Store
from tether.service.table import Row, read_table
from tether.service.training import measure, split
from tether.testing.conformance import at_this_load

ROOT = Path(__file__).parent.parent
SETTINGS = Settings(Path("unused"))
HOT, WIND = ("hot", "cold", "warm", "heat", "degrees"), ("windy", "rain", "snow", "sunny", "cloudy")
WEATHER = "".join(
    f"{opening} {word}{ending},{label}\n"
    for label, words in (("temperature", HOT), ("conditions", WIND))
    for word in words
    for opening, ending in (("Is it", " today?"), ("Will it be", "?"), ("How", " is it today?"))
)


# ---- the reader of uploads ------------------------------------------------------------------------------------------


def mistakes(text: str | bytes) -> list[tuple[int, int, str]]:
    data = text if isinstance(text, bytes) else text.encode()
    return [(one.line, one.column, one.kind) for one in read_table(data, SETTINGS).mistakes]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_all_line_ends_and_a_byte_order_mark_give_the_same_rows(end: str, mark: str) -> None:
    text = mark + end.join(['"a, ""b""", x , y', "c\\td,x", "e,y", "", "f,x", "g,y"])
    table = read_table(text.encode(), SETTINGS)
    assert not table.mistakes
    assert [(row.line, row.text, row.classes) for row in table.rows[:2]] == [
        (1, 'a, "b"', ("x", "y")),
        (2, "c\td", ("x",)),
    ]
    assert [row.line for row in table.rows] == [1, 2, 3, 5, 6]


def test_every_mistake_is_reported_with_its_line_and_column() -> None:
    text = 'a,x\nno class\n"open,x\nb"c,x\n"d"e,x\n,x\nf,\ng\th,x\ni\0j,x\n' + "k" * 1025 + ",x\n"
    assert mistakes(text) == [
        (2, 9, "Malformed data"),
        (3, 1, "Malformed data"),
        (4, 2, "Malformed data"),
        (5, 4, "Malformed data"),
        (6, 1, "Malformed data"),
        (7, 3, "Malformed data"),
        (8, 2, "Malformed data"),
        (9, 2, "Malformed data"),
        (10, 1025, "Phrase too long"),
    ]


def test_bytes_that_are_not_utf8_and_sizes_out_of_bounds_are_mistakes() -> None:
    assert mistakes(b"a,x\nb\xff,y\n") == [(2, 2, "Malformed data")]
    assert mistakes("a,x\nb,y\n")[0][2] == "Data too small"
    assert mistakes("a,x\n" * 9)[0][2] == "Data too small"
    assert mistakes("a,x\n" * 20_001) == [(20_001, 1, "Too many data instances")]
    assert mistakes("a" + ",x" * 1_000_000) == [(1, 206_849, "Phrase too long")]


def test_duplicates_and_conflicts_are_found() -> None:
    table = read_table(b"a,x\na,x\na,y\nb,y\nc,x\n", SETTINGS)
    assert (table.duplicates, table.conflicts) == ([(2, 1)], [(3, 1)])


VALUES = st.text(
    st.characters(codec="utf-8", exclude_characters="\\\r\n\t\v\f\0\x1c\x1d\x1e\x85\u2028\u2029"),
    min_size=1,
    max_size=20,
)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=5, max_size=20))
def test_what_is_written_in_quotes_is_read_back(rows: list[tuple[str, str]]) -> None:
    rows = [("t" + text.strip() + "t", "c" + label.strip() + "c") for text, label in rows]
    quoted = "\n".join(",".join('"' + value.replace('"', '""') + '"' for value in row) for row in rows)
    table = read_table(quoted.encode(), SETTINGS)
    assert [(row.text, *row.classes) for row in table.rows] == rows


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    for mistake in read_table(data, SETTINGS).mistakes:
        assert mistake.line >= 1 and mistake.column >= 1


def test_no_text_is_on_both_sides_and_every_class_keeps_a_row() -> None:
    rows = [Row(line, f"text {line // 2}", (f"class {line % 7}",)) for line in range(1, 200)]
    train, held_out = split(rows)
    assert held_out and len(train) + len(held_out) == len(rows)
    assert not {row.text for row in train} & {row.text for row in held_out}
    assert {label for row in rows for label in row.classes} == {label for row in train for label in row.classes}


def test_figures_count_any_class_of_a_row_as_right() -> None:
    rows = [(1, "a", ["x"]), (2, "b", ["x", "y"]), (3, "c", ["y"]), (4, "d", ["y"])]
    answers = {"a": "x", "b": "y", "c": "x", "d": "y"}
    found = measure(rows, lambda texts, top: [[(answers[text], 0.9)] for text in texts])
    assert found["accuracy"] == 0.75
    assert [(one["actual"], one["found"], one["rows"]) for one in found["confusion"]] == [
        ("x", "x", 1),
        ("y", "x", 1),
        ("y", "y", 2),
    ]
    assert [row["line"] for row in found["misclassified"]] == [3]
    assert found["macro_f1"] == pytest.approx((2 / 3 + 0.8) / 2)


# ---- keys and tables ------------------------------------------------------------------------------------------------


def test_a_key_opens_only_what_its_owner_has_until_it_is_revoked(tmp_path: Path) -> None:
    store = Store(Database(tmp_path / "x.sqlite"))
    access = Access(store, Settings(tmp_path, failures_per_minute=2))
    key, record = access.make_key("ann", "")
    assert key not in (tmp_path / "x.sqlite").read_bytes().decode("latin-1")
    basic = {"authorization": "Basic " + base64.b64encode(f"apikey:{key}".encode()).decode()}
    token = access.token(key, "")["access_token"]
    bearers = [{"authorization": f"Bearer {value}"} for value in (key, token)]
    assert [access.caller(one, "here") for one in (basic, *bearers)] == ["ann"] * 3
    about = {"name": "n", "language": "en", "row_count": 5, "class_count": 2, "bytes": 1}
    store.add("ann", "id", limits=(1, 1, 10), **about)
    with pytest.raises(Problem, match=r"Classifier not found\."):
        store.get("bob", "id")
    with pytest.raises(Problem, match="Too many classifiers"):
        store.add("ann", "id2", limits=(1, 1, 10), **about)
    store.finish("id", AVAILABLE, "", {})
    assert store.get("ann", "n")["id"] == "id"
    # the command line adds keys while a service runs
    other, _ = Access(store, Settings(tmp_path)).make_key("bob", "")
    assert access.caller({"authorization": f"Bearer {other}"}, "here") == "bob"
    with pytest.raises(Problem, match="with another one"):
        access.revoke(bearers[0], "here", record["id"])
    another, _ = access.make_key("ann", "")
    access.revoke({"authorization": f"Bearer {another}"}, "here", record["id"])
    for headers, code in zip((basic, *bearers), (401, 401, 429), strict=True):
        with pytest.raises(Problem) as refused:
            access.caller(headers, "here")
        assert refused.value.code == code


POSTGRES = shutil.which("initdb") or next(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")), None)


@pytest.mark.skipif(POSTGRES is None or os.geteuid() != 0, reason="needs PostgreSQL, and root to start it as nobody")
def test_postgresql_keeps_what_sqlite_keeps(tmp_path: Path) -> None:
    binaries = Path(str(POSTGRES)).resolve().parent
    where = tempfile.mkdtemp(dir="/tmp")
    os.chown(where, 65534, 65534)

    def run(name: str, *arguments: str) -> None:
        command = [str(binaries / name), "-D", f"{where}/data", *arguments]
        subprocess.run(command, user=65534, group=65534, cwd=where, check=True, stdout=subprocess.DEVNULL)

    run("initdb", "-U", "tether", "--auth=trust", "--no-sync")
    run("pg_ctl", "-w", "-o", f"-k {where} -c listen_addresses= -c fsync=off", "-l", f"{where}/log", "start")
    try:
        database = Database(tmp_path / "unused", f"postgresql://tether@/postgres?host={where}")
        store = Store(database)
        access = Access(store, Settings(tmp_path))
        key, _ = access.make_key("ann", "")
        assert access.caller({"authorization": f"Bearer {key}"}, "here") == "ann"
        about = {"language": "en", "row_count": 5, "class_count": 2, "bytes": 1, "limits": (9, 9, 10)}
        for name in ("one", "two"):
            store.add("ann", name, name="n", **about)
            store.finish(name, AVAILABLE, "", {"accuracy": 0.5})
        assert [store.get("ann", "n")[name] for name in ("id", "version", "figures")] == ["two", 2, {"accuracy": 0.5}]
        store.choose("ann", "n", "one")
        assert store.get("ann", "n")["id"] == "one"
        for owner, name in (("bob", "one"), ("ann", "o\0ne")):
            with pytest.raises(Problem, match=r"Classifier not found\."):
                store.get(owner, name)
        store.remove("ann", "one")
        assert store.names("ann") == {"n": "two"}
        store.count("ann", "classify", 3)
        assert [(row["kind"], row["count"]) for row in store.usage("ann")] == [("classify", 3)]
        run("pg_ctl", "-w", "-m", "fast", "restart", "-o", f"-k {where} -c listen_addresses=", "-l", f"{where}/log")
        assert store.ids() == {"two"}  # the connection was lost, and is made again
        database.close()
    finally:
        run("pg_ctl", "-w", "-m", "immediate", "stop")
        shutil.rmtree(where)


# ---- a service ------------------------------------------------------------------------------------------------------


class Served:
    """A service in a process of its own."""

    def __init__(self, data: Path, *options: str) -> None:
        command = [
            sys.executable,
            "-m",
            "tether",
            "serve",
            "--port",
            "0",
            "--data",
            str(data),
            "--workers",
            "1",
            *options,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"})
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        self.key = self.process.stdout.readline().split()[1] if "--no-auth" not in options else ""

    def ask(self, path: str, body: Any = None, method: str = "", **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method or None)
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        for name, value in headers.items():
            request.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                content, code = answer.read(), answer.status
        except urllib.error.HTTPError as error:
            content, code = error.read(), error.code
        try:
            return code, json.loads(content)
        except ValueError:
            return code, content

    def create(
        self, data: str, metadata: str = '{"language": "en", "name": "weather"}', **headers: str
    ) -> tuple[int, Any]:
        body = (
            f'--b\r\nContent-Disposition: form-data; name="training_metadata"; filename="filename"\r\n\r\n{metadata}'
            "\r\n"
            f'--b\r\nContent-Disposition: form-data; name="training_data"\r\n\r\n{data}\r\n--b--\r\n'
        ).encode()
        if headers.get("Content_Encoding") == "gzip":
            body = gzip.compress(body)
        return self.ask("/v1/classifiers", body, Content_Type="multipart/form-data; boundary=b", **headers)

    def wait(self, classifier_id: str) -> dict[str, Any]:
        """The events of a training end when it does."""
        self.ask(f"/api/classifiers/{classifier_id}/events")
        found: dict[str, Any] = self.ask(f"/api/classifiers/{classifier_id}")[1]
        return found

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(at_this_load(30))
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def csv_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("csv") / "weather.csv"
    path.write_text(WEATHER)
    return path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("service"))
    yield served
    served.end()


@pytest.fixture(scope="module")
def trained(service: Served) -> str:
    code, made = service.create(WEATHER.replace("\n", "\r"), Content_Encoding="gzip")
    assert (code, made["status"]) == (200, "Training")
    assert service.wait(made["classifier_id"])["status"] == "Available"
    name: str = made["classifier_id"]
    return name


def passed(printed: str) -> list[str]:
    """Without the SDK's notices that the service is retired."""
    return [line for line in printed.splitlines() if line.endswith("passed")]


PYTHON_SDK, NODE_SDK = ROOT / ".venv/watson/bin/python", ROOT / ".venv/node"


@pytest.mark.skipif(not PYTHON_SDK.exists(), reason="ibm-watson is not in .venv/watson: make test installs it")
def test_ibms_python_sdk_passes_all_calls_with_every_way_to_authenticate(service: Served, csv_file: Path) -> None:
    command = [str(PYTHON_SDK), str(ROOT / "tests/watson.py"), service.url, service.key, str(csv_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert passed(done.stdout) == ["basic passed", "bearer passed", "iam passed"], done.stderr


@pytest.mark.skipif(
    shutil.which("node") is None or not (NODE_SDK / "node_modules/ibm-watson").exists(),
    reason="node or ibm-watson in .venv/node is missing: make test installs it where there is npm",
)
def test_ibms_node_sdk_passes_all_calls_with_every_way_to_authenticate(service: Served, csv_file: Path) -> None:
    command = ["node", str(ROOT / "tests/watson.js"), str(NODE_SDK), service.url, service.key, str(csv_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert passed(done.stdout) == ["basic passed", "bearer passed", "iam passed"], done.stderr


def test_errors_have_the_shape_that_clients_show(service: Served, trained: str) -> None:
    small = service.create("a,x\n")
    assert small == (400, {"code": 400, "error": "Data too small: line 1, column 1: 1 rows; at least 5 are needed"})
    assert service.create(WEATHER, "{}")[1]["error"].startswith("Missing metadata")
    for path, body, code in (
        ("/v1/nothing", None, 404),
        ("/v1/classifiers/nothing", None, 404),
        (f"/v1/classifiers/{trained}/classify", b"{", 400),
        (f"/v1/classifiers/{trained}/classify", {"text": "x" * 2049}, 400),
        (f"/v1/classifiers/{trained}/classify_collection", {"collection": [{"text": "x"}] * 31}, 400),
        (f"/v1/classifiers/{trained}/classify", b" " * (2**20 + 1), 413),
        ("/v1/classifiers", b"", 415),
        (f"/api/classifiers/{trained}/cancel", b"", 409),
    ):
        found, answer = service.ask(path, body)
        assert (found, answer["code"]) == (code, code) and answer["error"], path
    request = urllib.request.Request(service.url + "/v1/classifiers", method="PUT")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert (refused.value.code, refused.value.headers["Allow"]) == (405, "GET, POST")
    refused.value.close()
    bomb = gzip.compress(b" " * 2**24)
    assert service.ask(f"/v1/classifiers/{trained}/classify", bomb, Content_Encoding="gzip")[0] == 413


def test_nobody_sees_or_changes_what_belongs_to_somebody_else(service: Served, trained: str) -> None:
    other = {"Authorization": "Bearer tk-0-0"}
    assert service.ask(f"/v1/classifiers/{trained}", **other)[0] == 401
    assert service.ask("/v1/classifiers", Origin="http://elsewhere.example")[0] == 403
    made = service.ask("/api/keys", {"name": "second"})[1]
    second = {"Authorization": f"Bearer {made['key']}"}
    assert service.ask(f"/v1/classifiers/{trained}", **second)[0] == 200
    assert service.ask(f"/api/keys/{made['id']}", method="DELETE")[0] == 200
    assert service.ask(f"/v1/classifiers/{trained}", **second)[0] == 401


SCHEMATHESIS = shutil.which("schemathesis", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(SCHEMATHESIS is None, reason="schemathesis is not installed")
def test_the_interface_is_as_it_is_described(tmp_path: Path) -> None:
    served = Served(tmp_path / "data", "--jobs", "1")
    command = [str(SCHEMATHESIS), "run", f"{served.url}/openapi.json", "-H", f"Authorization: Bearer {served.key}"]
    # an event stream goes on until its training has ended, behind all others in the queue
    command += ["--exclude-path", "/api/classifiers/{classifier_id}/events", "--phases", "coverage,fuzzing"]
    command += ["--max-examples", "2", "--seed", "1", "--generation-database", "none", "--request-timeout", "60"]
    try:
        done = subprocess.run(
            [*command, "--no-color"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stdout
    finally:
        served.end()


def test_figures_mistakes_and_the_data_can_be_had(service: Served, trained: str) -> None:
    found = service.ask(f"/api/classifiers/{trained}/figures")[1]
    assert found["held_out_rows"] == 3 and {one["class_name"] for one in found["classes"]} <= {
        "temperature",
        "conditions",
    }
    assert service.ask(f"/api/classifiers/{trained}/misclassified")[0] == 200
    assert service.ask(f"/api/classifiers/{trained}/data")[1] == WEATHER.replace("\n", "\r").encode()
    report = service.ask("/api/validate", b"a,x\nb\n")[1]
    assert [(one["line"], one["column"]) for one in report["mistakes"]] == [(2, 2)]
    assert service.ask("/openapi.json")[0] == 200
    assert any(one["kind"] == "create" for one in service.ask("/api/usage")[1]["usage"])


def test_the_downloaded_model_classifies_without_the_service(service: Served, trained: str, tmp_path: Path) -> None:
    content = service.ask(f"/api/classifiers/{trained}/model")[1]
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".pkl", ".pt"))]
        archive.extractall(tmp_path)
    text = "How hot is it today?"
    command = [sys.executable, "-m", "tether", "classify", str(tmp_path / trained), text, "--json"]
    [alone] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["texts"]
    served = service.ask(f"/v1/classifiers/{trained}/classify", {"text": text})[1]
    assert alone["label"] == served["top_class"]
    assert alone["probability"] == pytest.approx(served["classes"][0]["confidence"], abs=1e-5)


def test_what_was_acknowledged_survives_a_kill_and_what_is_deleted_is_gone(tmp_path: Path, csv_file: Path) -> None:
    served = Served(tmp_path, "--no-auth")
    metadata = '{"language": "en", "name": "weather", "out_of_scope": true}'
    made = served.create(WEATHER, metadata)[1]["classifier_id"]
    served.process.kill()
    served.process.wait()
    served.process.stdout.close()  # type: ignore[union-attr]
    served = Served(tmp_path, "--no-auth")
    try:
        assert served.wait(made)["status"] == "Available"
        several = WEATHER.replace("temperature", "temperature,any").replace("conditions", "conditions,any")
        far = served.ask(f"/v1/classifiers/{made}/classify", {"text": "Which team has won the cup final?"})[1]
        assert (far["top_class"], far["out_of_scope"]) == ("out_of_scope", True) and len(far["classes"]) == 2
        near = {"collection": [{"text": "How hot is it today?"}]}
        found = served.ask(f"/api/classifiers/{made}/classify_batch", near)[1]
        assert found["stage"] == "final"
        assert (found["collection"][0]["top_class"], found["collection"][0]["out_of_scope"]) == ("temperature", False)
        path = f"/v1/classifiers/{made}/classify?out_of_scope=false&text=cup"
        assert "out_of_scope" not in served.ask(path)[1]
        second = served.create(several)[1]["classifier_id"]
        assert served.wait(second)["version"] == 2
        found = served.ask(f"/v1/classifiers/{second}/classify", {"text": "How hot is it today?"})[1]["classes"]
        assert found[0]["class_name"] == "any"
        assert sum(one["confidence"] for one in found) > 1.2  # each class is likely by itself
        for command in (
            [str(PYTHON_SDK), str(ROOT / "tests/watson.py")],
            ["node", str(ROOT / "tests/watson.js"), str(NODE_SDK)],
        ):
            if all(Path(shutil.which(part) or part).exists() for part in command):
                done = subprocess.run([*command, served.url, "", str(csv_file)], capture_output=True, text=True)
                assert passed(done.stdout) == ["none passed"], done.stderr
        assert served.ask("/api/names/weather", {"classifier_id": made}, "PUT")[0] == 200
        assert served.ask("/v1/classifiers/weather")[1]["classifier_id"] == made
        assert served.ask(f"/v1/classifiers/{made}", method="DELETE") == (200, {})
        assert not (tmp_path / "classifiers" / made).exists()
        assert served.ask("/v1/classifiers/weather")[1]["classifier_id"] == second
        assert served.ask("/v1/classifiers", Host="elsewhere.example")[0] == 403
    finally:
        served.end()


def test_the_page_uploads_trains_classifies_and_deletes(service: Served, csv_file: Path) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(at_this_load(30) * 1000)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: dialog.accept())
        page.goto(service.url)
        page.fill("#key", service.key)
        page.press("#key", "Enter")
        bad = csv_file.with_name("bad.csv")
        bad.write_text("a,x\nno class\n")
        page.set_input_files("#file", str(bad))
        page.wait_for_selector("#checked td:has-text('expected a text, a comma and a class')")
        page.set_input_files("#file", str(csv_file))
        page.wait_for_selector("#create:not([hidden])")
        page.fill("#name", "in the browser")
        page.press("#name", "Enter")
        page.wait_for_selector("#results:not([hidden])", timeout=at_this_load(120) * 1000)
        page.wait_for_selector("#accuracy-curve svg.main-svg")
        page.fill("#try-text", "How hot is it today?")
        page.press("#try-text", "Enter")
        assert page.inner_text("#answer tbody td >> nth=0") == "temperature"
        page.click("button[aria-label='Delete in the browser version 1']")
        page.wait_for_selector("#list td:has-text('in the browser')", state="detached")
        assert page.is_hidden("#detail")
        assert not faults
        browser.close()
