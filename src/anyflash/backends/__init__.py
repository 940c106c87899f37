"""Host adapters, one per backend; `base.py` says what a backend is."""
