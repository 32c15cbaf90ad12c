"""The lock under which heavy libraries are first imported."""

import threading

import_lock = threading.RLock()
"""Held while transformers or torch is imported, and while a first call imports more of it.

Their lazy modules look their parts up without a lock, so that of two threads that use one for the
first time, one meets half of it. Take it in functions only: a module that takes it while it is
imported waits for its own importer.
"""
