"""`onelip methods` and `onelip models` at several widths, into a pipe, and about one of them."""

import json
from typing import get_args

import pytest
from _runs import call, onelip

from onelip.cli import methods as command
from onelip.methods.registry import METHODS, Guarantee, Mechanism, by_year, options_of
from onelip.models import describe_model, list_models

METHOD_TEXTS = {method.name: method.title for method in by_year()}
MODEL_TEXTS = {name: describe_model(name).title for name in list_models()}
LISTS = [("methods", METHOD_TEXTS), ("models", MODEL_TEXTS)]


def entries(text):
    """The list's part of the output, put together again: first word of an entry, and all its words."""
    found, name = {}, ""
    for line in text.partition("\n\n")[0].splitlines()[1:]:
        if not line.startswith(" "):
            name = line.split()[0]
            found[name] = line
        else:
            found[name] += " " + line.strip()
    return found


@pytest.mark.parametrize("width", [80, 100, 140, 200])
@pytest.mark.parametrize(("words", "texts"), LISTS)
def test_lists_fit_and_nothing_is_cut(capsys, monkeypatch, width, words, texts):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = call(capsys, words)
    assert code == 0
    assert max(map(len, out.splitlines())) <= width
    assert "…" not in out
    found = entries(out)
    assert list(found) == list(texts)
    assert all(text in found[name] for name, text in texts.items())
    assert f"onelip {words} NAME" in out


def test_columns_come_with_the_width(capsys, monkeypatch):
    heads = {}
    for width in (80, 140, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        heads[width] = call(capsys, "methods")[1].splitlines()[0].split("  ")
        heads[width] = [head.strip() for head in heads[width] if head]
    assert heads[80] == ["name", "guarantee", "method"]
    assert heads[140] == ["name", "guarantee", "acts as", "method"]
    assert heads[200] == ["name", "guarantee", "acts as", "layers", "method"]
    monkeypatch.setenv("COLUMNS", "140")
    lines = call(capsys, "methods")[1].partition("\n\n")[0].splitlines()
    assert len(lines) <= 1 + len(METHODS) * 1.1  # a line each, but for a very long title


def test_a_narrow_terminal_wraps_and_cuts_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    found = entries(call(capsys, "models")[1])
    assert all(text in found[name] for name, text in MODEL_TEXTS.items())


@pytest.mark.parametrize(("words", "texts"), LISTS)
def test_into_a_pipe_a_line_is_an_entry(words, texts):
    done = onelip(words, COLUMNS="")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.partition("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(texts)
    assert all(line.endswith(text) for line, text in zip(lines, texts.values(), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_everything_about_a_method(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    method = METHODS[name]
    code, out, _ = call(capsys, "methods", name)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    shown = " ".join(out.split())
    citation = method.citation
    assert citation.endswith(".")
    assert citation.count('"') >= 2
    for text in (method.title, method.note, citation, *(o.text for o in options_of(method))):
        assert " ".join(text.split()) in shown
    assert f"guarantee {method.guarantee or 'none'}:" in shown
    assert all(f"{key} " in shown for key in method.hyperparameters)
    assert all(option.text for option in options_of(method))  # none without a word
    found = json.loads(call(capsys, "methods", name, "--json")[1])
    assert found["citation"] == citation
    assert list(found["options"]) == [option.name for option in options_of(method)]


@pytest.mark.parametrize("name", list_models())
def test_everything_about_a_model(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "120")
    model = describe_model(name)
    code, out, _ = call(capsys, "models", name)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 120
    assert out.startswith(f"{name}: {model.title}")
    assert all(f"{option}=" in out and model.texts[option] in " ".join(out.split()) for option in model.options)
    assert json.loads(call(capsys, "models", name, "--json")[1])["options"] == json.loads(json.dumps(model.options))


def test_every_kind_is_explained():
    assert set(command._GUARANTEES) == {*get_args(Guarantee), "none"}
    assert set(command._MECHANISMS) == set(get_args(Mechanism))
