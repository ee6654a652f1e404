"""A harness that keeps looking for wrong results: random cases against models that share no code with it.

``python -m tests.fuzz ops --seconds 600 --device cpu --processes 8 --seed 0 --out ops.json`` runs a campaign at length,
``python -m tests.fuzz ops --seed 0 --case 1234`` runs one case again, exactly. CONTRIBUTING.md says more.
"""
