"""Drives a service with IBM's own Python SDK, in an environment of its own: python watson.py URL KEY CSV.

Without a key (an empty one) it asks without authentication. Prints "passed" for each way to authenticate.
"""

import json
import sys
import time

from ibm_cloud_sdk_core import ApiException
from ibm_cloud_sdk_core.authenticators import (
    BasicAuthenticator,
    BearerTokenAuthenticator,
    IAMAuthenticator,
    NoAuthAuthenticator,
)
from ibm_watson import NaturalLanguageClassifierV1

url, key, file = sys.argv[1:]
ways = (
    {
        "basic": BasicAuthenticator("apikey", key),
        "bearer": BearerTokenAuthenticator(key),
        "iam": IAMAuthenticator(key, url=url),
    }
    if key
    else {"none": NoAuthAuthenticator()}
)
made = ""
for way, authenticator in ways.items():
    service = NaturalLanguageClassifierV1(authenticator=authenticator)
    service.set_service_url(url + ("/instances/some-guid" if way == "iam" else "/natural-language-classifier/api"))
    service.set_enable_gzip_compression(way == "bearer")
    if not made:
        with open(file, "rb") as data:
            answer = service.create_classifier(json.dumps({"language": "en", "name": "sdk"}), data)
        about = answer.get_result()
        assert about["status"] == "Training" and answer.get_headers()["X-Global-Transaction-ID"], about
        made = about["classifier_id"]
        try:
            service.classify(made, "How hot is it?")
            raise AssertionError("it classified while it trained")
        except ApiException as error:
            assert error.code == 409, error
        deadline = time.monotonic() + 600
        while service.get_classifier(made).get_result()["status"] == "Training" and time.monotonic() < deadline:
            time.sleep(0.2)
    assert service.get_classifier(made).get_result()["status"] == "Available"
    assert made in [one["classifier_id"] for one in service.list_classifiers().get_result()["classifiers"]]
    found = service.classify(made, "How hot is it today?").get_result()
    assert found["top_class"] == found["classes"][0]["class_name"] == "temperature", found
    several = [{"text": "Is it hot?"}, json.dumps({"text": "Is it windy?"})]
    found = service.classify_collection(made, several).get_result()
    assert [one["text"] for one in found["collection"]] == ["Is it hot?", "Is it windy?"], found
    for wrong, code in (("a,b\n", 400), ("a,b\n" * 4 + "c\n", 400)):
        try:
            service.create_classifier(json.dumps({"language": "en"}), wrong)
            raise AssertionError("it accepted a bad file")
        except ApiException as error:
            assert error.code == code and error.message.startswith(("Data too small", "Malformed data: line 5")), error
    print(way, "passed")
assert service.delete_classifier(made).get_result() == {}
try:
    service.get_classifier(made)
    raise AssertionError("it was not deleted")
except ApiException as error:
    assert error.code == 404 and error.message == "Classifier not found."
