"""What `onelip compare` measures: ratios and memory."""

from _comparisons import SHARED, small_data

from onelip.compare import measures
from onelip.compare.measures import peak_mebibytes
from onelip.core.rounding import rounded_up


def test_constants_are_printed_rounded_up():
    for value in (1.0, 1 + 1e-12, 0.9999999, 1234567.8, 3e-7, 12.3456789):
        assert float(rounded_up(value)) >= value
    assert rounded_up(1 + 1e-12) == "1.00001"


def test_memory_is_measured_in_a_process_of_its_own():
    assert 0.5 < peak_mebibytes(SHARED.replace(method="none", batch_size=500), 10, (1, 8, 8)) < 1000


def test_memory_ratios(monkeypatch):
    monkeypatch.setattr(measures, "peak_mebibytes", lambda *args: 30.0)
    data = small_data()
    assert measures.memory_ratio(SHARED, data, 10.0)["ratio"] == 3.0
    for baseline, why in ((None, "could not be measured"), (0.5, "noise"), (float("nan"), "noise")):
        found = measures.memory_ratio(SHARED, data, baseline)
        assert found["ratio"] is None
        assert why in found["why"]


def test_a_measure_that_fails_costs_the_row_only_itself():
    def fail():
        raise RuntimeError("no such operation")

    assert measures._or_reason(fail) == {"ratio": None, "proved": None, "why": "RuntimeError: no such operation"}
