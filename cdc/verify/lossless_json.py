"""JSON whose numbers survive Spark's parser, which makes doubles of those within objects and lists.

Every value that is a number or a string becomes a marked string; text taken out of a document still tells 1 from "1".
The marks are code points that no text has (Unicode noncharacters).
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

STRING, NUMBER = "\ufdd1", "\ufdd0"
_TEXT = r'(?:[^"\\]++|\\.)*+'
_MARKED = rf'"{STRING}((?:[^"\\{NUMBER}]++|\\.)*+){NUMBER}"'
_TOKEN = rf'"({_TEXT})"|(-?[0-9][0-9.eE+-]*+)'


def marked(text: Column) -> Column:
    """JSON text with "a" as "«a»" and 1 as "«»1", where « is STRING and » is NUMBER; names of members stay."""
    all_marked = F.regexp_replace(text, _TOKEN, f'"{STRING}$1{NUMBER}$2"')
    return F.regexp_replace(all_marked, rf"{_MARKED}(\s*+:)", '"$1"$2')


def unmarked(text: Column) -> Column:
    """The way back."""
    numbers = F.regexp_replace(text, f'"{STRING}{NUMBER}([^"{NUMBER}]++)"', "$1")
    return F.regexp_replace(numbers, _MARKED, '"$1"')


def string(marked_one: Column) -> Column:
    """A string without its marks, once the parser has taken it out of a marked text."""
    return F.regexp_replace(marked_one, f"^{STRING}|{NUMBER}$", "")
