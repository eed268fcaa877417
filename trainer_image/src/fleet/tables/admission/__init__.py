"""Admission rules: which ids get a row. One of one's own is a class that has what `Admission` says."""

from fleet.tables.admission.bloom import BloomFilter
from fleet.tables.admission.count import CountFilter
from fleet.tables.admission.interface import Admission, Candidates
from fleet.tables.admission.probability import Probability

__all__ = ["Admission", "BloomFilter", "Candidates", "CountFilter", "Probability"]
