"""The public API and the command line, on a tiny model folder."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessor

import bastion
from bastion.cost import probe, store
from bastion.cost.base import Measurement
from bastion.decoding.budget import Chain, FixedBudget, Plain, Throughput
from bastion.decoding.stats import RoundRecord
from bastion.decoding.tree import DraftTree
from bastion.drafters.marginal import MarginalProposal
from bastion.drafters.ngram import NgramDrafter
from targets.loading_support import write_chat_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_chat_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No test reads or writes the user's cache, and none probes for long."""
    monkeypatch.setenv("BASTION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("bastion.cost.probe.ROWS", (1, 2, 4, 8))
    monkeypatch.setattr("bastion.cost.probe.CONTEXTS", (8, 16))
    monkeypatch.setattr("bastion.cost.probe.REPEATS", 1)
    monkeypatch.setattr("bastion.cost.probe.ROUNDS", 2)
    return tmp_path / "cache"


@pytest.fixture
def model(folder):
    return bastion.load(folder, policy="fixed:6")


def test_generate_stream_and_batch_agree(model):
    result = model.generate("aaa bbb aaa", max_new_tokens=24)
    assert len(result.token_ids) == result.stats.new_tokens <= 24
    assert "".join(model.stream("aaa bbb aaa", max_new_tokens=24)) == result.text
    pieces = []
    model.generate("aaa bbb aaa", max_new_tokens=24, on_text=pieces.append)
    assert "".join(pieces) == result.text
    model.set_policy("plain")
    assert model.generate("aaa bbb aaa", max_new_tokens=24).token_ids == result.token_ids
    batch = model.generate_batch(["aaa bbb aaa", "c"], max_new_tokens=24)
    assert batch[0].token_ids == result.token_ids
    assert batch[1].text == model.generate("c", max_new_tokens=24).text


def test_batch_seeds_follow_each_other(model):
    sampling = {"max_new_tokens": 12, "temperature": 1.0}
    batch = model.generate_batch(["a", "a"], seed=3, **sampling)
    assert batch[0].token_ids == model.generate("a", seed=3, **sampling).token_ids
    assert batch[1].token_ids == model.generate("a", seed=4, **sampling).token_ids
    assert batch[0].token_ids != batch[1].token_ids


def test_prompts_go_through_the_chat_template_unless_raw(model):
    decode = model.tokenizer.decode
    assert decode(model.encode("hi")) == "user: hi\nassistant:"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert decode(model.encode(messages)) == "system: s\nuser: u\nassistant:"
    assert decode(model.encode("hi", raw=True)) == "hi"
    with pytest.raises(bastion.BastionError, match="as one text"):
        model.encode(messages, raw=True)
    with pytest.raises(bastion.BastionError, match="empty"):
        model.encode("", raw=True)


def test_sampling_parameters_are_honoured_or_refused(model):
    seen = []

    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(input_ids.shape[1])
            only = torch.full_like(scores, -torch.inf)
            only[:, 40] = 0
            return only

    result = model.generate("a", max_new_tokens=5, processors=[Only()])
    assert result.token_ids == [40] * 5
    assert seen[0] == len(model.encode("a"))
    with pytest.raises(TypeError, match="presence_penalty"):
        model.generate("a", presence_penalty=1.0)
    with pytest.raises(bastion.BastionError, match="top_p must be"):
        model.generate("a", top_p=2.0)
    text = model.generate("a", max_new_tokens=24).text
    stop = text[6:9]
    stopped = model.generate("a", max_new_tokens=24, stop=stop)
    assert stopped.text == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "a list of messages"),
        (None, "a list of messages"),
        ([{"role": "user"}], "needs a role and a content"),
        (["hi"], "needs a role and a content"),
        ("a\udcff", "cannot be encoded"),
    ],
)
def test_malformed_prompts_are_refused(model, prompt, message):
    with pytest.raises(bastion.BastionError, match=message):
        model.generate(prompt)
    with pytest.raises(bastion.BastionError, match="takes a list"):
        model.generate_batch("hello")


@pytest.mark.parametrize(
    "bad", [{"seed": 2**64}, {"seed": 1.5}, {"temperature": None}, {"top_k": True}, {"max_new_tokens": 2.5}]
)
def test_parameters_of_the_wrong_kind_are_refused(model, bad):
    with pytest.raises(bastion.BastionError, match=next(iter(bad))):
        model.generate("a", **bad)


def test_a_special_token_is_a_stop_string_too(model):
    text = model.generate("a", max_new_tokens=24, raw=True)
    ids = text.token_ids
    special = model.tokenizer.add_special_tokens({"additional_special_tokens": ["[stop]"]})
    assert special == 1
    new = model.tokenizer.convert_tokens_to_ids("[stop]")
    ids_to = model.tokenizer.convert_tokens_to_ids
    model.tokenizer.convert_tokens_to_ids = lambda token: ids[5] if ids_to(token) == new else ids_to(token)
    stopped = model.generate("a", max_new_tokens=24, raw=True, stop="[stop]")
    assert stopped.token_ids == ids[: ids.index(ids[5]) + 1]


def test_texts_with_and_without_features_may_take_turns(folder):
    """Two models share a target; one reads its features. Streams are interleaved, policies changed in between."""
    plain = bastion.load(folder, policy="fixed:4")
    reading = bastion.Model(plain.target, plain.tokenizer, Reader(plain.target), "fixed:4", plain.end_ids)
    expected = "".join(plain.stream("aab", max_new_tokens=20))
    stream = reading.stream("aab", max_new_tokens=20)
    pieces = [next(stream)]
    reading.set_policy("plain")
    assert "".join(reading.stream("aab", max_new_tokens=20)) == expected
    assert "".join(plain.stream("aab", max_new_tokens=20)) == expected
    assert "".join(pieces + list(stream)) == expected


class Reader:
    """A drafter that insists on the features of every token before the root."""

    name, digest, depth, feature_layers = "reader", "reader", 2, (1,)

    def __init__(self, target):
        self.vocab = target.shape.vocab

    def propose(self, contexts):
        for context in contexts:
            context.memory = (context.memory or 0) + sum(map(len, context.features))
            context.features.clear()
            assert context.memory == len(context.tokens) - 1
        return [MarginalProposal(torch.zeros(2, self.vocab).log_softmax(-1)) for _ in contexts]


def test_the_context_is_the_limit(model):
    room = model.target.max_context
    with pytest.raises(bastion.BastionError, match="shorten it"):
        model.generate("a" * (room + 1), raw=True)
    prompt = "ab" * 200
    ids = model.encode(prompt, raw=True)[: room - 3]
    result = model.generate(model.tokenizer.decode(ids), raw=True, max_new_tokens=50)
    assert result.finish_reason in ("length", "eos")
    assert result.stats.prompt_tokens + len(result.token_ids) <= room


def test_generation_config_sets_defaults_and_gives_notice(folder, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 41], "repetition_penalty": 1.2, "no_repeat_ngram_size": 3})
    )
    model = bastion.load(copy, policy="plain")
    assert model.end_ids == {2, 41}
    assert model.sampling_defaults == {"repetition_penalty": 1.2}
    assert any("no_repeat_ngram_size" in notice for notice in model.notices)


def test_policies_by_name(model):
    def policy(spec):
        model.set_policy(spec)
        return model.policy

    assert isinstance(policy("plain"), Plain)
    assert isinstance(policy("chain:3"), Chain)
    assert policy("chain:3").max_nodes == 3
    assert policy("fixed:7") == FixedBudget(7)
    for name in ("roofline", "profile", "auto"):
        assert isinstance(policy(name), Throughput)
        assert policy(name).max_nodes == 7  # the probe went up to 8 rows
        assert policy(f"{name}:3").max_nodes == 3
    own = FixedBudget(2)
    model.set_policy(own)
    assert model.policy is own
    for bad, message in {
        "tree": "unknown policy", "fixed": "needs a budget", "fixed:0": "1 to 4096", "fixed:x": "1 to 4096",
        "plain:3": "takes no budget", "auto:": "1 to 4096", "chain:" + "9" * 5000: "1 to 4096",
    }.items():  # fmt: skip
        with pytest.raises(bastion.BastionError, match=message):
            model.set_policy(bad)


def test_a_chain_target_restricts_a_copy_of_the_policy(model, monkeypatch):
    monkeypatch.setattr(model.target, "tree_support", "chain", raising=False)
    own = FixedBudget(8)
    model.set_policy(own)
    assert model.policy.width == 1
    assert own.width is None
    monkeypatch.setattr(model.target, "tree_support", "none", raising=False)
    model.set_policy("auto")
    assert isinstance(model.policy, Plain)
    with pytest.raises(bastion.BastionError, match="nothing to calibrate"):
        model.calibrate()


def test_one_hiccup_does_not_end_the_grid(model, monkeypatch):
    times = {1: 1.0, 2: 1.1, 4: 60.0, 8: 1.3, 16: 1.5, 32: 7.0, 64: 14.0, 128: 30.0}
    monkeypatch.setattr("bastion.cost.probe._time_pass", lambda target, generation, rows, generator: times[rows])
    assert probe._grid(model.target, None, sorted(times), torch.Generator()) == [1, 2, 4, 8, 16, 32, 64]


def test_a_calibration_that_cannot_be_kept_is_used_all_the_same(folder, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BASTION_CACHE", str(tmp_path / "file"))
    assert bastion.load(folder).generate("a", max_new_tokens=4).token_ids
    assert "set BASTION_CACHE to another folder" in capsys.readouterr().err


def test_a_new_calibration_reaches_the_policy_in_use(model):
    model.set_policy("profile")
    before = model.policy
    model.calibrate(force=True)
    assert model.policy is not before


@pytest.fixture
def measured(monkeypatch):
    """Which passes and rounds were measured, by made-up ones."""
    found = SimpleNamespace(passes=[], rounds=[])

    def passes(target, advance):
        found.passes.append(target.dtype)
        sizes = [(rows, context) for rows in (1, 2, 4, 8) for context in (8, 16, 32)]
        return [Measurement(r, c, 0.01 * len(found.passes) + 0.001 * r) for r, c in sizes]

    def rounds(target, drafter, verify, max_nodes):
        found.rounds.append((drafter.name, max_nodes))
        return probe.RoundTimes(0.001, 0.0005, 0.0)

    monkeypatch.setattr("bastion.calibration.probe_passes", passes)
    monkeypatch.setattr("bastion.calibration.probe_rounds", rounds)
    return found


def test_calibration_is_measured_once_kept_and_never_used_for_another_setting(folder, measured, capsys):
    first = bastion.load(folder, dtype="float32").calibrate()
    assert "measuring this machine, once" in capsys.readouterr().err
    assert bastion.load(folder, dtype="float32").calibrate() == first
    assert measured.rounds == [("ngram", 7)]
    assert capsys.readouterr().err == ""
    bastion.load(folder, dtype="bfloat16").calibrate()
    assert "stale: dtype float32 != bfloat16" in capsys.readouterr().err
    assert measured.passes == [torch.float32, torch.bfloat16]
    model = bastion.load(folder, dtype="float32")
    model.calibrate(force=True)
    assert len(measured.passes) == 3
    key = store.CalibrationKey.here(model.target, model.drafter)
    store.save(store.load(key)[0]).write_text("{")
    bastion.load(folder, dtype="float32").calibrate()
    assert "corrupt" in capsys.readouterr().err
    assert len(measured.passes) == 4


def test_all_drafters_of_a_target_are_weighed_by_the_same_passes(folder, measured):
    shallow, deep = (bastion.load(folder, drafter=NgramDrafter(depth)) for depth in (4, 8))
    first, second = shallow.calibrate(), deep.calibrate()
    assert first.measurements == second.measurements
    assert first.key != second.key
    assert (len(measured.passes), len(measured.rounds)) == (1, 2)
    again = deep.calibrate(force=True)
    assert again.measurements != first.measurements
    assert shallow.calibrate().measurements == again.measurements
    assert (len(measured.passes), len(measured.rounds)) == (2, 4)


def test_a_machine_that_is_slow_for_a_while_is_measured_all_the_same(model, monkeypatch):
    """The true cost is 1 + rows / 10; for the middle half of all passes, the machine runs at half its speed."""
    passes, whole = itertools.count(), 150

    def time_pass(target, generation, rows, generator):
        return (1 + rows / 10) * (2 if whole // 4 < next(passes) < 3 * whole // 4 else 1)

    monkeypatch.setattr(probe, "ROWS", (1, 2, 4, 8, 16))
    monkeypatch.setattr(probe, "REPEATS", 3)
    monkeypatch.setattr(probe, "_time_pass", time_pass)
    found = probe.probe_passes(model.target)
    assert 0.8 * whole < next(passes) < 1.2 * whole
    single = min(m.seconds for m in found if m.rows == 1)
    for m in found:
        assert m.seconds / single == pytest.approx((1 + m.rows / 10) / 1.1, rel=0.02)


def test_drafting_is_measured_in_passes(model, monkeypatch):
    """Rounds count in units of their own verify pass: it lasts as long as the cost says, whatever the clock said."""
    seconds = {"draft": 3.0, "grow": 1.0, "accept": 0.5, "commit": 0.5, "verify": 6.0}
    record = RoundRecord(10, DraftTree.root_only(1), [0], [1], seconds, passes=1)
    monkeypatch.setattr(probe, "decode", lambda *_: [(None, "", None), (None, "", record), (None, "", record)])
    cost = SimpleNamespace(seconds=lambda rows, context: 0.04 * rows)
    assert probe.probe_rounds(model.target, model.drafter, cost, 8) == probe.RoundTimes(
        pytest.approx(0.02), pytest.approx(0.04 / 3), 0.0
    )


def test_command_generate(folder, tmp_path, run_command):
    common = ("--target", folder, "--policy", "fixed", "--budget", 5, "--max-new-tokens", 16)
    status, text, error = run_command("generate", "aab aab", *common)
    assert status == 0
    assert "tokens/s" in error
    trace = tmp_path / "trace.jsonl"
    status, out, _ = run_command("generate", "aab aab", *common, "--json", "--trace", trace)
    report = json.loads(out)
    assert report["text"] + "\n" == text
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(lines) == report["stats"]["rounds"]
    written = [token for line in lines for token in line["tokens"]]
    assert written[: len(report["token_ids"]) - 1] == report["token_ids"][1:]
    for line in lines:
        path = [line["tree"][node]["token"] for node in line["accepted"]]
        assert path[1:] == line["tokens"][:-1]
        assert set(line["seconds"]) >= {"verify", "accept", "commit"}


def test_trace_holds_predictions_of_throughput_policies(folder, tmp_path, run_command):
    trace = tmp_path / "trace.jsonl"
    arguments = ("--target", folder, "--policy", "profile", "--max-new-tokens", 8, "--trace", trace)
    assert run_command("generate", "aab aab", *arguments)[0] == 0
    assert json.loads(trace.read_text().splitlines()[0])["predicted_seconds"]["verify"] > 0


def test_command_calibrate_and_doctor(folder, tmp_path, cache, run_command):
    status, out, _ = run_command("calibrate", "--target", folder, "--dry-run")
    assert status == 0
    assert "absent" in out
    assert not list(cache.rglob("*.json"))
    plot = tmp_path / "fit.png"
    status, out, _ = run_command("calibrate", "--target", folder, "--plot", plot)
    assert status == 0
    assert "profile ms" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    status, out, _ = run_command("calibrate", "--target", folder, "--dry-run")
    assert "valid" in out
    status, out, _ = run_command("doctor")
    assert status == 0
    assert "calibration of 20" in out
    next(cache.rglob("calibrations/*.json")).write_text("[]")
    status, out, _ = run_command("doctor")
    assert "corrupt" in out


def test_command_demo_and_models(folder, monkeypatch, run_command):
    monkeypatch.setattr("bastion.cli.demo.QUESTION", "a b")
    monkeypatch.setattr("bastion.cli.demo.PROMPTS", {"one": "a b a b", "two": "c"})
    arguments = ("--target", folder, "--max-new-tokens", 6, "--repeats", 1)
    status, out, _ = run_command("demo", *arguments)
    assert status == 0
    assert out.count("yes") == 10
    status, out, _ = run_command("models", "list")
    assert status == 0
    assert "smollm2-135m" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "a", "--target", "no/such/model/here"], "no/such/model/here"),
        (["generate", "a", "--policy", "nonsense"], "unknown policy 'nonsense'"),
        (["generate", "a", "--policy", "fixed:3", "--budget", "4"], "given twice"),
        (["generate", "a", "--temperature", "-1"], "temperature must be"),
        (["generate", "a", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["generate", "a", "--device", "toaster"], "unknown device"),
        (["generate", "a", "--dtype", "int3"], "unknown dtype"),
        (["generate", "a", "--drafter", "no_such_folder_anywhere"], "no_such_folder_anywhere"),
        (["generate", "a", "--trace", "/no/such/folder/trace"], "cannot write the trace"),
        (["generate", "a", "--stop", ""], "must not be empty"),
        (["calibrate", "--plot", "/no/such/folder/plot.png"], "cannot write the plot"),
        (["models", "fetch", "nothing"], "no model 'nothing' in the zoo"),
        (["demo", "--repeats", "0"], "repeats must be"),
        (["generate"], "Missing argument"),
    ],
)
def test_bad_input_is_one_line_and_status_two(folder, monkeypatch, arguments, message, run_command):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "--target" not in arguments and arguments[0] in ("generate", "calibrate", "demo"):
        arguments = [*arguments, "--target", str(folder)]
    status, out, error = run_command(*arguments)
    assert status == 2
    assert out == ""
    assert message in error
    assert "Traceback" not in error
    if "Missing" not in message:
        assert len(error.strip().splitlines()) == 1
