"""Task text: what it reads, how it encodes, what it chooses by itself, and what it refuses."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tether import Callback, Local, Sim, Single, tasks
from tether.core.vector import Vector
from tether.errors import Damaged, UsageError
from tether.learner.learner import Learner, build_model, evaluate
from tether.tasks.networks import TextCnn
from tether.tasks.text import HELD_OUT, Classifier, Encoder, Text, figures, tokens
from tether.tasks.text.features import Features
from tether.tasks.text.linear import Linear, scores
from tether.testing.conformance import train_quietly

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

HEAD = "text,label\n"
HOT = ["is it hot outside", "how warm is it", "will the heat last", "what is the temperature"]
WET = ["will it rain", "is there snow on the road", "do i need an umbrella", "when does the storm come"]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def weather(path: Path, times: int = 10) -> Path:
    """Eight different rows of two labels, each repeated `times` times."""
    rows = [f"{text}?,{label}\n" for label, texts in (("hot", HOT), ("wet", WET)) for text in texts]
    return write(path, "text,label\n" + "".join(rows) * times)


def sizes(task: Text) -> tuple[int, int, int]:
    return len(task.train_data()), len(task.validation_data()), len(task.test_data())


def refusal(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(UsageError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "BOM"])
def test_a_csv_is_read_with_quotes_blank_lines_and_any_line_ends(tmp_path: Path, end: str, mark: str) -> None:
    lines = ["text,label", '"one, ""two""",a', "", "three , b", "four,a", "größer,b"]
    path = tmp_path / "t.csv"
    path.write_bytes((mark + end.join(lines)).encode())
    task = Text(path, test=path, validation=0)
    assert task.labels == ["a", "b"]
    assert task.words.keys() == {"one", ",", '"', "two", "three", "four", "größer"}
    assert task.train_data().tensors[1].tolist() == [0, 1, 0, 1]


def test_columns_are_the_first_two_or_those_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "text,coarse,fine\none,a,x\ntwo,b,y\nthree,a,z\n")
    assert Text(path).labels == ["a", "b"]
    assert Text(path, label_column="fine", test=path).labels == ["x", "y", "z"]
    assert Text(path, text_column="fine", label_column="text", test=path).words.keys() == {"x", "y", "z"}


def test_without_a_header_the_first_line_is_a_row(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "one,a\ntwo,b\nthree,a\nfour,b\n")
    assert len(Text(path, header=False, test=path, validation=0).train_data()) == 4
    message = refusal(Text, path)
    assert "t.csv, line 1" in message and "set header=false" in message


def test_held_out_rows_are_found_beside_the_training_rows_or_given(tmp_path: Path) -> None:
    train = weather(tmp_path / "x_train.csv")
    assert sizes(Text(train)) == (65, 7, 8)
    weather(tmp_path / "x_test.csv", times=2)
    assert sizes(Text(train)) == (72, 8, 16)
    other = weather(tmp_path / "other.csv", times=1)
    assert sizes(Text(train, test=str(other), validation=0)) == (80, 0, 8)


class First(nn.Module):
    """Whatever it is asked, it answers the first of two labels."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, texts: Tensor) -> Tensor:
        return self.scores.expand(len(texts), 2)


def test_rows_that_tell_when_to_stop_are_neither_trained_on_nor_those_of_the_error(tmp_path: Path) -> None:
    rows = "".join(f"w{i} w{i} w{i} w{i} w{i},{i % 2}\n" for i in range(100))
    task = Text(write(tmp_path / "t.csv", HEAD + rows), validation=0.4)
    assert sizes(task) == (54, 36, 10)
    # a word that was not trained on is not known
    known = [int((part.tensors[0] > 1).sum()) for part in (task.train_data(), task.validation_data(), task.test_data())]
    assert known == [5 * 54, 0, 0]

    metrics = evaluate(task, First())
    for name, part in (("validation_error", task.validation_data()), ("network_error", task.test_data())):
        assert metrics[name] == pytest.approx(float(part.tensors[1].float().mean()))
    assert list(metrics) == ["error", "loss", "macro_f1", "linear_error", "network_error", "validation_error"]


def test_without_rows_set_aside_the_defaults_decide_how_much_each_model_counts(tmp_path: Path) -> None:
    task = Text(weather(tmp_path / "t.csv"), validation=0)
    assert "validation_error" not in evaluate(task, build_model(task, 0))
    alone = write(tmp_path / "x_train.csv", HEAD + "one,a\ntwo,b\n")
    task = Text(alone, test=alone)
    assert sizes(task) == (2, 0, 2)
    assert "at most 0.5" in refusal(Text, alone, validation=0.6)


def test_otherwise_a_tenth_of_every_label_is_held_out_and_always_the_same(tmp_path: Path) -> None:
    rows = [f"w{i},{label}" for label, count in (("a", 200), ("b", 50), ("c", 1)) for i in range(count)]
    path = write(tmp_path / "t.csv", "\n".join(["text,label", *rows]))
    task = Text(path)
    held_out = Counter(task.test_data().tensors[1].tolist())
    assert held_out.keys() == {0, 1} and abs(held_out[0] - 20) <= 1 and abs(held_out[1] - 5) <= 1
    assert set(task.train_data().tensors[1].tolist()) == {0, 1, 2}
    assert torch.equal(Text(path).train_data().tensors[0], task.train_data().tensors[0])
    seen = {f"w{i}" for i in range(200)} - task.words.keys()
    assert seen, "the vocabulary knows words that only held-out rows have"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is empty"),
        (HEAD, "no rows below its header"),
        ("text;label\none;a\n", "only the column 'text;label'"),
        (HEAD + "one,a\ntwo\n", "line 3 has 1 field and line 1 has 2"),
        (HEAD + "one,a\n\ntwo, three,b\n", "line 4 has 3 fields and line 1 has 2"),
        (HEAD + '"one\nmore",a\n ,b\n', "line 4 has an empty text"),
        (HEAD + "one,a\ntwo, \n", "line 3 has an empty label"),
        (HEAD + "one,a\ntwo,a\n", "all rows have the label 'a'"),
        (HEAD + "one,a\ntwo,b\n", "one row of each label"),
        (HEAD + 'one,a\n"two,b\nthree,c\n', "line 3: unexpected end of data"),
        (HEAD + 'one,a\n"two" more,b\n', "line 3: ',' expected"),
        ("label,text\na,one\n", "no 'fine'"),
    ],
)
def test_a_csv_that_cannot_be_trained_on_is_refused_with_file_and_line(
    tmp_path: Path, content: str, complaint: str
) -> None:
    path = write(tmp_path / "t.csv", content)
    message = refusal(Text, path, label_column="fine" if "fine" in complaint else None)
    assert str(path) in message and complaint in message


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbftext,label\r\none,a\r\ncaf\xe9,b\r\n")
    assert f"{path}, line 3 is not UTF-8" in refusal(Text, path)


def test_a_test_label_that_training_lacks_is_refused_with_its_line(tmp_path: Path) -> None:
    train = weather(tmp_path / "x_train.csv")
    test = write(tmp_path / "x_test.csv", HEAD + "snow,wet\nsun,dry\n")
    message = refusal(Text, train)
    assert f"{test}, line 3" in message and "'dry'" in message and "label_column" in message


def test_files_and_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    assert "--data FILE.csv" in refusal(tasks.load, "text")
    assert "is a folder" in refusal(Text, tmp_path)
    assert "cannot be read: No such file" in refusal(Text, tmp_path / "nowhere.csv")
    path = weather(tmp_path / "t.csv")
    assert "cannot be read: No such file" in refusal(Text, path, test="nowhere.csv")
    assert "at least 5" in refusal(Text, path, length=4)
    assert "at least 1" in refusal(Text, path, vocabulary=0)
    assert "both text and label" in refusal(Text, path, text_column="label")
    assert "have no names" in refusal(Text, path, header=False, label_column="label")


# ---- words ----------------------------------------------------------------------------------------------------------


def test_tokens_are_lower_case_words_numbers_and_signs() -> None:
    assert tokens("Don't pay £9.50!") == ["don't", "pay", "£", "9", ".", "50", "!"]
    assert tokens("Ĝis-2,OK?  \t x_y 你好") == ["ĝis", "-", "2", ",", "ok", "?", "x_y", "你", "好"]
    assert tokens(" \n") == []


def test_words_are_counted_in_training_rows_only_and_ordered_by_frequency_then_alphabet(tmp_path: Path) -> None:
    train = write(tmp_path / "x_train.csv", HEAD + "b a c a,x\nc d b a,y\n")
    write(tmp_path / "x_test.csv", HEAD + "a unseen,x\n")
    task = Text(train)
    assert task.words == {"a": 2, "b": 3, "c": 4, "d": 5}
    assert Text(train, vocabulary=2).words == {"a": 2, "b": 3}
    assert task.test_data().tensors[0].tolist() == [[2, 1, 0, 0, 0]]


def test_texts_are_cut_and_padded_to_the_length_that_suits_95_of_100(tmp_path: Path) -> None:
    rows = [f"{'w ' * (7 if i < 96 else 50)},{i % 2}\n" for i in range(100)]
    path = write(tmp_path / "t.csv", "text,label\n" + "".join(rows))
    task = Text(path, test=path)
    assert task.length == 7
    assert task.encode(["w w", "", "W other " * 9]).tolist() == [
        [2, 2, 0, 0, 0, 0, 0],
        [0] * 7,
        [2, 1, 2, 1, 2, 1, 2],
    ]
    assert Text(path, length=9).encode([]).shape == (0, 9)


def test_a_pickled_task_classifies_without_its_file(tmp_path: Path) -> None:
    path = weather(tmp_path / "t.csv")
    task = Text(path)
    samples = task.train_data().tensors
    pickled = pickle.dumps(task)
    assert len(pickled) < 2000
    copy = pickle.loads(pickled)
    assert all(torch.equal(a, b) for a, b in zip(copy.train_data().tensors, samples, strict=True))
    path.unlink()
    copy = pickle.loads(pickled)
    scores = build_model(copy, 0)(copy.encode(["Will it rain?"]))
    assert scores.shape == (1, len(copy.labels))


# ---- the model ------------------------------------------------------------------------------------------------------


def test_gadei_figure_2_filters_of_three_widths_and_the_largest_answer_of_each() -> None:
    torch.manual_seed(0)
    model = TextCnn(words=20, classes=3, embedding=6, filters=4).eval()
    text = torch.randint(1, 20, (2, 9))
    embedded = functional.pad(model.embedding(text).transpose(1, 2), (0, 5))
    pooled = []
    for width, layer in zip((3, 4, 5), model.filters, strict=True):
        assert isinstance(layer, nn.Linear)
        kernel = layer.weight.view(4, width, 6).transpose(1, 2)
        pooled.append(functional.conv1d(embedded, kernel, layer.bias).relu().amax(2))
    torch.testing.assert_close(model(text), model.output(torch.cat(pooled, 1)))


def test_padding_is_zero_and_stays_zero(tmp_path: Path) -> None:
    task = Text(weather(tmp_path / "t.csv"), embedding=4, filters=3)
    texts, labels = task.train_data().tensors
    assert int((texts == 0).sum()) > 0
    learner = Learner(task, iter([[texts, labels]] * 5), node="worker-0", seed=0)
    for _ in range(5):
        learner.compute("dense", False)
        learner.step(None, 1.0)
    assert float(learner.weights[:4].abs().max()) == 0
    assert float(learner.weights[4:8].abs().max()) > 0


def test_sparse_gradients_of_the_embedding_equal_dense_ones_in_the_vector() -> None:
    text, labels = torch.tensor([[2, 3, 2, 5, 0], [7, 1, 4, 2, 6]], dtype=torch.int32), torch.tensor([0, 1])
    gradients = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = TextCnn(9, 2, 4, 3, sparse).eval()
        assert model.embedding.sparse is sparse
        vector = Vector(model)
        for _ in range(2):  # the second must not add to the first
            vector.gradient.zero_()
            functional.cross_entropy(model(text), labels).backward()
            gradient = vector.gather_gradient().clone()
        gradients.append(gradient)
    assert torch.equal(*gradients) and float(gradients[0].abs().max()) > 0


# ---- what it chooses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "size", "epochs"), [(100, 8, 25), (5_999, 32, 10), (30_000, 128, 3)])
def test_mini_batch_and_epochs_follow_the_number_of_rows(tmp_path: Path, rows: int, size: int, epochs: int) -> None:
    test = write(tmp_path / "x_test.csv", HEAD + "w,0\n")
    train = write(tmp_path / "x_train.csv", HEAD + "".join(f"w,{i % 2}\n" for i in range(rows)))
    task = Text(train)
    assert (task.batch_size, task.epochs) == (size, epochs)
    assert sum(sizes(task)) == rows + 1 and test.name in task.note() and f"mini-batches of {size}" in task.note()


def test_given_settings_win_over_chosen_ones(tmp_path: Path) -> None:
    path = weather(tmp_path / "t.csv")
    given = Text(path, batch_size=7, learning_rate=0.5)
    assert (given.batch_size, given.learning_rate) == (7, 0.5)
    assert Text(path).learning_rate == 0.003 and Text(path, momentum=0.0).learning_rate == 0.01
    loaded = tasks.load("text", data=path, settings={"batch_size": "3", "sparse": "yes", "length": "6"})
    assert isinstance(loaded, Text) and (loaded.batch_size, loaded.sparse, loaded.length) == (3, True, 6)


# ---- training -------------------------------------------------------------------------------------------------------


def test_a_run_answers_with_the_linear_model_first_and_with_both_at_its_end(tmp_path: Path) -> None:
    task, stages = Text(weather(tmp_path / "t.csv")), []

    class Watch(Callback):
        def on_evaluation(self, step: int, samples: int, metrics: dict[str, float]) -> None:
            stages.append(Classifier.load(tmp_path / "run").stage)

    result = train_quietly(task, Single(), Sim(1), tmp_path / "run", callbacks=[Watch()])
    assert result.metrics["error"] == 0 and set(stages) == {"linear"}
    assert task.note() in (tmp_path / "run" / "metrics.jsonl").read_text()
    classifier = Classifier.load(tmp_path / "run")
    assert classifier.stage == "final" and classifier.labels == ["hot", "wet"]
    found = classifier.classify(["Rain or snow on the road?", "How hot will it be", ""])
    assert [answers[0].label for answers in found[:2]] == ["wet", "hot"]
    assert all(sum(answer.probability for answer in answers) == pytest.approx(1) for answers in found)
    rows = json.loads((tmp_path / "run" / "task" / HELD_OUT).read_text())["rows"]
    assert len(rows) == 8 and figures(rows)["accuracy"] == 1 and figures(rows)["classes"].keys() == {"hot", "wet"}
    classifier.save(tmp_path / "alone")
    assert Classifier.load(tmp_path / "alone").classify(["heat"]) == classifier.classify(["heat"])


def test_rows_may_have_several_labels_each_with_a_probability_by_itself(tmp_path: Path) -> None:
    rows = [("red apple", "fruit,red"), ("red car", "car,red"), ("green apple", "fruit"), ("blue car", "car")]
    path = write(tmp_path / "t.csv", "".join(f"{text} {i},{labels}\n" for i in range(15) for text, labels in rows))
    assert "has 2 fields" in refusal(Text, path, header=False)
    task = Text(path, header=False, multilabel=True, holdout=0)
    assert task.labels == ["car", "fruit", "red"] and task.train_data().tensors[1].sum(1).max() == 2
    train_quietly(task, Single(), Sim(1), tmp_path / "run")
    classifier = Classifier.load(tmp_path / "run")
    found = {label for label, probability in classifier.classify(["a red apple"])[0] if probability > 0.5}
    assert classifier.multilabel and found == {"fruit", "red"}
    named = write(tmp_path / "n.csv", HEAD + "one two,a|b\nthree,a\nfour,b\n")
    assert Text(named, test=named, multilabel=True).labels == ["a", "b"]


def test_a_damaged_classifier_is_refused(tmp_path: Path) -> None:
    (tmp_path / "classifier.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(Damaged, match="train again"):
        Classifier.load(tmp_path)
    assert "has no classifier" in refusal(Classifier.load, tmp_path / "nowhere")


def test_dual_coordinate_descent_reaches_the_minimum_of_the_squared_hinge_loss() -> None:
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(list("abcdefgh"), 4)) for _ in range(60)]
    features, matrix = Features.of(texts)
    targets = np.where(random.random((60, 3)) < 0.4, 1, -1).astype(np.float32)
    fitted = Linear.fit(matrix, targets, np.arange(60), features.count).weights
    rows = np.repeat(np.arange(60), np.diff(matrix.starts))
    dense = torch.zeros(60, features.count)
    dense[rows, matrix.columns] = torch.from_numpy(matrix.values)

    def objective(weights: Tensor) -> Tensor:
        margins = torch.from_numpy(targets) * (dense @ weights)
        return (weights**2).sum() / 2 + ((1 - margins).clamp_min(0) ** 2).sum()

    best = torch.zeros(features.count, 3, requires_grad=True)
    optimizer = torch.optim.LBFGS([best], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        objective(best).backward()
        return float(objective(best).detach())

    optimizer.step(closure)
    assert float(objective(torch.from_numpy(fitted))) < 1.02 * float(objective(best).detach())
    assert np.allclose(scores(features.matrix(texts), fitted), (dense @ torch.from_numpy(fitted)).numpy(), atol=1e-4)


def test_features_of_equal_texts_are_equal_and_others_are_left_out() -> None:
    features, matrix = Features.of(["How far is it?", "東京は雨です", "비가 와요", "مَطَر"])
    again = features.matrix(["how FAR  is it ?", "東京は雨です", "비가 와요", "مطر", "zzz"])
    for name in ("columns", "values"):
        assert np.array_equal(getattr(again, name)[:-1], getattr(matrix, name))
    assert again.columns[-1] == features.count - 1 and np.diff(again.starts)[-1] == 1


def test_texts_unlike_all_rows_are_out_of_scope(tmp_path: Path) -> None:
    train_quietly(Text(weather(tmp_path / "t.csv")), Single(), Sim(1), tmp_path / "run", epochs=1)
    classifier = Classifier.load(tmp_path / "run")
    texts = ["Rain or snow on the road?", "Who has composed this sonata?", "\u3042"]
    assert classifier.out_of_scope(texts) == [False, True, True]
    assert Classifier.from_bytes(classifier.to_bytes()).out_of_scope(texts) == [False, True, True]
    assert classifier.out_of_scope([]) == []


def tiny_encoder(folder: Path) -> Path:
    """In HuggingFace's layout, with random weights."""
    transformers = pytest.importorskip("transformers", reason="the extra huggingface is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "it", "is", "rain", "snow", "hot", "heat"]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=32, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def test_an_encoder_of_a_local_folder_gives_further_features(tmp_path: Path) -> None:
    folder = tiny_encoder(tmp_path / "encoder")
    task = Text(weather(tmp_path / "t.csv"), encoder=str(folder))
    train_quietly(task, Single(), Sim(1), tmp_path / "run", epochs=1)
    assert "--encoder" in refusal(Classifier.load, tmp_path / "run")
    classifier = Classifier.load(tmp_path / "run", folder)
    assert [answers[0].label for answers in classifier.classify(["rain or snow", "heat"])] == ["wet", "hot"]
    encoder = Encoder.open(folder)
    vectors = encoder(["rain " * 9, "hot", "rain " * 9])
    assert vectors.shape == (3, 8) and np.allclose(vectors[0], vectors[2], atol=1e-6)
    assert np.allclose(encoder(["hot"])[0], vectors[1], atol=1e-5)  # padding changes nothing
    (tmp_path / "encoder" / "config.json").unlink()
    assert "has no config.json" in refusal(Encoder, folder)
    other = tiny_encoder(tmp_path / "other")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + " ")
    assert "is not the one" in refusal(Classifier.load, tmp_path / "run", other)


def test_workers_in_processes_of_their_own_read_the_rows_again(tmp_path: Path) -> None:
    task = Text(weather(tmp_path / "t.csv"))
    result = train_quietly(task, Single(), Local(1), tmp_path / "run", epochs=3)
    assert result.figures["reason"] == "all steps made" and result.metrics["error"] < 0.5


@pytest.mark.skipif(not (SHARED / "trec_train.csv").exists(), reason=f"{SHARED / 'trec_train.csv'} is not there")
def test_trec_is_read_and_half_an_epoch_beats_guessing(tmp_path: Path) -> None:
    task = Text(SHARED / "trec_train.csv", batch_size=32)
    assert task.labels == ["ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"]
    assert sizes(task) == (4907, 545, 500)
    result = train_quietly(task, Single(), Sim(1), tmp_path / "run", epochs=0.5)
    assert result.metrics["error"] < 0.6  # the most frequent label alone has 0.72
