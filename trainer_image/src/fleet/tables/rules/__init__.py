"""Row rules: one optimizer of tables a file. One of one's own is a class that has what `RowRule` says."""

from fleet.tables.rules.adagrad import Adagrad, RowwiseAdagrad
from fleet.tables.rules.adam import Adam
from fleet.tables.rules.ftrl import FTRL
from fleet.tables.rules.interface import RowRule, Rows, Slot
from fleet.tables.rules.of_optimizer import options_of, rule_of
from fleet.tables.rules.rmsprop import RMSprop
from fleet.tables.rules.sgd import SGD, Momentum

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Momentum",
    "RMSprop",
    "RowRule",
    "Rows",
    "RowwiseAdagrad",
    "Slot",
    "options_of",
    "rule_of",
]
