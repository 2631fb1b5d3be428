// Drives a service with IBM's own Node SDK: node watson.js FOLDER_WITH_NODE_MODULES URL KEY CSV
const path = require("path");
const fs = require("fs");
const [modules, url, key, file] = process.argv.slice(2);
const from = (name) => require(path.join(modules, "node_modules", name));
const Service = from("ibm-watson/natural-language-classifier/v1");
const auth = from("ibm-watson/auth");
const check = (holds, what) => { if (!holds) throw new Error(JSON.stringify(what)); };

(async () => {
  const ways = key
    ? { basic: new auth.BasicAuthenticator({ username: "apikey", password: key }), bearer: new auth.BearerTokenAuthenticator({ bearerToken: key }), iam: new auth.IamAuthenticator({ apikey: key, url }) }
    : { none: new auth.NoAuthAuthenticator() };
  let classifierId, service;
  for (const [way, authenticator] of Object.entries(ways)) {
    service = new Service({ authenticator, serviceUrl: url });
    if (!classifierId) {
      const made = (await service.createClassifier({ trainingMetadata: Buffer.from(JSON.stringify({ language: "en", name: "node" })), trainingData: fs.createReadStream(file) })).result;
      check(made.status === "Training", made);
      classifierId = made.classifier_id;
      const deadline = Date.now() + 600000;
      while ((await service.getClassifier({ classifierId })).result.status === "Training" && Date.now() < deadline) await new Promise((done) => setTimeout(done, 200));
    }
    const { result } = await service.classify({ classifierId, text: "How hot is it today?" });
    check(result.top_class === "temperature", result);
    const several = (await service.classifyCollection({ classifierId, collection: [{ text: "Is it hot?" }, { text: "Is it windy?" }] })).result;
    check(several.collection.length === 2, several);
    check((await service.listClassifiers()).result.classifiers.some((one) => one.classifier_id === classifierId), "list");
    console.log(way, "passed");
  }
  check(JSON.stringify((await service.deleteClassifier({ classifierId })).result) === "{}", "delete");
})().catch((error) => { console.error(error); process.exit(1); });
