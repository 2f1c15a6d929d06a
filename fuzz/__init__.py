"""A fuzzer of onelip: random layers, networks, radii and forged certificates against oracles of its own.

    python -m fuzz --seconds 60                        all parts
    python -m fuzz --part networks --seconds 600 --jobs 2 --seed 7 --out results/fuzz.json
    python -m fuzz --replay fuzz/corpus/x.json         a case that failed once

    library.py     every call into onelip; nothing else here imports it
    oracle.py      norms and slopes by brute force
    programs.py    random networks, as lines of Python from a table
    layers.py, networks.py, radii.py, forgeries.py     the parts: draw a case, check it, make it smaller
    reference.py   a second reader of certificates, written from docs/certificates.md
    engine.py      time, counts, shrinking, the corpus

A case is a JSON object. docs/fuzzing.md states what each part checks.
"""
