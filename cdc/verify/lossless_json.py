"""Lossless JSON: numbers survive Spark's parser.

It otherwise turns those within objects and lists into doubles.

Every number or string becomes a marked string, so that text taken out of a document still tells 1
from "1". The marks are code points that no text has (Unicode noncharacters).
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

STRING, NUMBER = "\ufdd1", "\ufdd0"
_TEXT = r'(?:[^"\\]++|\\.)*+'
_MARKED = rf'"{STRING}((?:[^"\\{NUMBER}]++|\\.)*+){NUMBER}"'
_TOKEN = rf'"({_TEXT})"|(-?[0-9][0-9.eE+-]*+)'


def marked(text: Column) -> Column:
    """Mark JSON text: "a" becomes "«a»", and 1 becomes "«»1" (« is STRING, » is NUMBER).

    Member names stay.
    """
    all_marked = F.regexp_replace(text, _TOKEN, f'"{STRING}$1{NUMBER}$2"')
    return F.regexp_replace(all_marked, rf"{_MARKED}(\s*+:)", '"$1"$2')
