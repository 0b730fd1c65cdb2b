"""The file of a run's answers goes on with that run alone."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from mars_jax.cli import merge
from mars_jax.cli.part import Part
from mars_jax.core.errors import MarsError
from mars_jax.integrations.answer_file import Answered, Answers, place_of

REQUESTS = [SimpleNamespace(args=(text, {"until": []})) for text in ("one", "two", "three")]


def answers(path, *, calls=(REQUESTS,), part=None, settings=None, weights=None):
    """Run to the end; returns what `answer` had to make."""
    file = Answers(path, part, {"seed": 0} if settings is None else settings, weights or {"target": "a"})
    made, found = [], []
    for requests in calls:

        def answer(numbers, requests=requests):
            for number in numbers:
                made.append(requests[number].args[0])
                yield (float("-inf"), made[-1])

        found += [(requests[i].args[0], answer) for i, answer in file.of("loglikelihood", requests, answer)]
    assert all(answer == ["-inf", asked] for asked, answer in found)
    file.end()
    return made


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


def test_a_row_on_file_is_not_answered_again_and_a_torn_one_is(path):
    assert answers(path) == ["one", "two", "three"] and answers(path) == []
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert answers(path) == ["three"] and path.read_bytes() == whole
    assert answers(path, calls=(REQUESTS[:2], REQUESTS[2:])) == []


def test_parts_number_the_requests_of_all_calls(path):
    calls = (REQUESTS, REQUESTS[:2], REQUESTS)  # requests 0 to 7
    with pytest.raises(Answered, match=r"rows\.jsonl: 3 of 8 rows"):
        answers(path, calls=calls, part=Part(1, 3))
    rows = [json.loads(line)["answer"][1] for line in path.read_text().splitlines()]
    assert rows == ["two", "two", "three"]
    told = json.loads(path.with_name("rows.jsonl.settings.json").read_text())["settings"]["part"]
    assert (told["number"], told["of"], told["rows"]) == (1, 3, 8) and len(told["prompts"]) == 16
    with pytest.raises(MarsError, match="--part 8/9 has none of the 8 rows: take fewer parts"):
        answers(path.with_name("none.jsonl"), calls=calls, part=Part(8, 9))


def test_a_part_that_lost_rows_goes_on_by_the_same_command(path, capsys):
    for number in range(2):
        with pytest.raises(Answered):
            part = path.with_name(f"rows-0000{number}-of-00002.jsonl")
            answers(part, part=Part(number, 2), settings={"max_gen_toks": 256})
    part.write_bytes(b"")
    assert merge.main([str(path)]) == 2
    told = f"'{part}' is unfinished: run it again with --part 1/2, and it goes on."
    assert told in capsys.readouterr().err


def test_a_run_that_has_ended_is_not_gone_on_with(path):
    file = Answers(path, None, {"seed": 0}, {"target": "a"})

    def answer(numbers):
        return [(0.0, REQUESTS[n].args[0]) for n in numbers]

    assert len(list(file.of("loglikelihood", REQUESTS, answer))) == 3
    file.end()
    file.end()  # the harness asks twice
    with pytest.raises(MarsError, match="has ended: make another model for another run"):
        list(file.of("loglikelihood", REQUESTS, answer))


def test_a_file_of_another_run_is_refused_by_what_differs_and_left_alone(path):
    answers(path)
    whole = path.read_bytes()

    def refused(message, content=whole, **run):
        path.write_bytes(content)
        with pytest.raises(MarsError) as caught:
            answers(path, **run)
        assert message in str(caught.value) and path.read_bytes() == content

    refused("was begun with other seed (0 and not 1): choose another --rows", settings={"seed": 1})
    refused("was begun with other target", weights={"target": "b"})
    refused("line 1 of '", calls=(REQUESTS[1:],))
    refused("has more rows than this run has requests", calls=(REQUESTS[:2],))
    refused("the last line of '", content=b"notes")
    path.write_bytes(whole)
    with pytest.raises(MarsError, match=r"was begun with other seed \(0 and not 1\)"):
        Answers(path, None, {"seed": 1})  # before weights are there to compare
    Answers(path, None, {"seed": 0}).close()
    path.with_name("rows.jsonl.settings.json").unlink()
    refused("is damaged or missing: choose another --rows.")


def test_where_no_file_can_be_is_said_with_the_cure(path):
    with pytest.raises(MarsError, match=r"there is no directory '.*none' for --rows: make it first\."):
        Answers(path.parent / "none" / "rows.jsonl", None, {})
    with pytest.raises(MarsError, match=r"--rows '.*' is not a regular file: choose another path\."):
        Answers(path.parent, None, {})
    Answers(path, None, {}).close()
    assert not path.exists()


def test_a_place_is_a_file_of_this_machine(tmp_path):
    assert place_of("runs/out.jsonl", None)[1] is None
    file, part = place_of(str(tmp_path / "out.jsonl"), "3/16")
    assert file == tmp_path / "out-00003-of-00016.jsonl" and part == Part(3, 16)
    with pytest.raises(
        MarsError, match=r"rows 'gs://bucket/out\.jsonl' is a URL: name a path of this machine"
    ):
        place_of("gs://bucket/out.jsonl", None)
