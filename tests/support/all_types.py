"""Tables with a column of every type that the connector carries, and values for each."""

import re

UUID = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
EXTENSIONS = ("citext", "hstore", "ltree", "vector")
SETUP = (
    "CREATE SCHEMA one",
    "CREATE SCHEMA two",
    """CREATE TYPE one.mood AS ENUM ('sad', 'ha"p,py')""",
    "CREATE TYPE two.mood AS ENUM ('ok', 'sad')",
    "CREATE DOMAIN positive AS int CHECK (value > 0)",
    "CREATE DOMAIN small AS positive CHECK (value < 10)",
    "CREATE DOMAIN price AS numeric(10,2)",
    "CREATE DOMAIN day AS date",
    "CREATE DOMAIN stamp AS timestamptz(3)",
    "CREATE DOMAIN ints AS int[]",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE TYPE span AS (a int, b interval, c bytea, d date)",
    "CREATE TYPE intervalrange AS RANGE (subtype = interval)",
    "CREATE TYPE floatrange AS RANGE (subtype = float8)",
)
# type -> SQL values; column names are made from the types, so that a difference names its type.
VALUES: dict[str, tuple[str, ...]] = {
    "smallint": ("-32768", "32767"),
    "int": ("-2147483648", "2147483647"),
    "bigint": ("-9223372036854775808", "9223372036854775807", "9007199254740993"),
    "oid": ("0", "4294967295"),
    "numeric": (
        "1.50",
        "('1' || repeat('2', 999))::numeric",
        "'NaN'",
        "'Infinity'",
        "'-Infinity'",
        "1e-30",
    ),
    "numeric(10,2)": ("1.5", "-99999999.99", "0"),
    "numeric(5,-2)": ("12345",),
    "numeric(2,4)": ("0.0012",),
    "numeric(50,10)": ("1234567890123456789012345678901234567890.0123456789",),
    "real": (
        "1.1",
        "'NaN'",
        "'Infinity'",
        "'-Infinity'",
        "'-0'",
        "3.4028235e38",
        "1e-45",
        "1e15",
        "16777216",
    ),
    "double precision": (
        *("0.1", "'NaN'", "'Infinity'", "'-Infinity'", "'-0'", "1.7976931348623157e308", "5e-324"),
        *("9007199254740993", "1e-7"),
    ),
    "money": ("12.34", "-92233720368547758.08"),
    "text": (
        "''",
        "'é😀'",
        r"""E'a\tb\nc\r\x01\x1f\x7f"\\/'""",
        r"E'\u2028\u0085'",
        "'null'",
        "repeat('long ', 20000)",
    ),
    "varchar(9)": ("'x  '", "''"),
    "char(5)": ("'ab'", "''"),
    "name": ("'n'",),
    "citext": ("'AbC'",),
    "bytea": ("''", r"'\x00ff1080'", "decode(repeat('ab', 100), 'hex')"),
    "boolean": ("true", "false"),
    "date": (
        *(
            "'2013-01-02'",
            "'infinity'",
            "'-infinity'",
            "'0044-03-15 BC'",
            "'0001-12-31 BC'",
            "'12000-01-01'",
        ),
        *("'5874897-12-31'", "'4714-11-24 BC'", "'1582-10-10'"),
    ),
    "time": ("'10:00'", "'24:00:00'", "'23:59:59.999999'"),
    "time(0)": ("'10:00:00'",),
    "time(3)": ("'10:00:00.5'",),
    "timetz": ("'10:00:00+02'", "'24:00:00+00'", "'00:30:00+02'", "'10:00:00.123456-07:30'"),
    "timestamp": (
        *(
            "'2013-01-01 10:00'",
            "'infinity'",
            "'-infinity'",
            "'0044-03-15 12:00:00.5 BC'",
            "'12000-01-01 00:00:00.000001'",
        ),
        *(
            "'4714-11-24 00:00:00 BC'",
            "'1969-12-31 23:59:59.999999'",
            "'1582-10-10 00:00'",
            "'294246-12-31 23:59:59'",
        ),
    ),
    "timestamp(0)": ("'2013-01-01 10:00'", "'infinity'"),
    "timestamp(3)": ("'2013-01-01 10:00:00.5'",),
    "timestamptz": (
        *("'2013-01-01 10:00+02'", "'infinity'", "'-infinity'", "'0044-03-15 12:00:00.5+00 BC'"),
        *(
            "'12000-01-01 00:00:00.000001+00'",
            "'4714-11-24 00:00:00+00 BC'",
            "'1582-10-10 00:00+00'",
        ),
    ),
    "timestamptz(0)": ("'2013-01-01 10:00:00+00'", "'infinity'"),
    "timestamptz(3)": ("'2013-01-01 10:00:00.5+00'",),
    "interval": (
        *(
            "'1 year 2 mons 3 days 04:05:06.7'",
            "'-1 year -2 mons +3 days -04:05:06.7'",
            "'0'",
            "'178000000 years'",
        ),
        *("'-00:00:00.000001'", "'30:00:00'", "'-1 day +00:00:01'"),
    ),
    "interval year to month": ("'1-2'",),
    "uuid": (f"'{UUID}'",),
    "json": (
        *(
            """'{"b":1.10,"a":[null]}'""",
            "'null'",
            "'12345678901234567890.123'",
            """'"x"'""",
            "'[]'",
        ),
        r"""E'{"u":"\\u00e9\\ud83d\\ude00",\n "n":1e400}'""",
        # What an index refuses at first.
        """'{"b":1.10,"a":{"c":1,"c":2},"b":2.50}'""",
        "('[' || repeat('7', 1500) || ']')::json",
    ),
    "jsonb": (
        *(
            """'{"a":1,"b":{"c":[1,null,"x"]}}'""",
            "'null'",
            "'12345678901234567890.123'",
            """'"x"'""",
            "'{}'",
            "'true'",
        ),
        """'{"":0,"n":{"z":12345678901234567890.123,"y":1.10}}'""",
        "('{\"n\":' || repeat('7', 1500) || '.5}')::jsonb",
        "repeat('7', 1500)::jsonb",
    ),
    "one.mood": ("'sad'", """'ha"p,py'"""),
    "two.mood": ("'sad'",),
    "int[]": ("'{1,NULL,3}'", "'{}'", "'[2:3]={1,2}'"),
    "bigint[]": ("'{9223372036854775807,NULL}'",),
    "text[]": (r"""ARRAY['a,b', NULL, '', 'q"\', 'NULL', '{x}', 'é😀']""", "'{}'"),
    "char(3)[]": ("ARRAY['a','b ']",),
    "numeric[]": ("'{1.50,NULL,1e40}'",),
    "numeric(10,2)[]": ("'{1.5,NULL}'",),
    "real[]": ("'{1.1,NaN,NULL,Infinity,-0,1e15}'",),
    "double precision[]": ("'{1.1,NaN,NULL,-Infinity}'",),
    "timestamptz[]": ("'{2013-01-01 10:00+02,NULL,infinity,-infinity}'",),
    "timestamp[]": ("'{2013-01-01 10:00:00.123456,NULL,infinity,-infinity}'",),
    "date[]": ("'{2013-01-01,NULL,infinity,-infinity,12000-01-01}'",),
    "timetz[]": ("'{10:00:00.123456+02,NULL}'",),
    "bool[]": ("'{t,NULL,f}'",),
    "uuid[]": (f"'{{{UUID},NULL}}'",),
    "bytea[]": (r"ARRAY['\x00ff'::bytea, NULL, '']",),
    "one.mood[]": ("ARRAY['sad']::one.mood[]",),
    "jsonb[]": ("""ARRAY['{"a":12345678901234567890.123}'::jsonb, '"x"']""",),
    "inet[]": ("'{10.0.0.1,NULL}'",),
    "int4range[]": ("ARRAY['[1,3)'::int4range, NULL]",),
    "tsquery[]": ("ARRAY['a & b'::tsquery]",),
    "hstore": ("""'a=>1, b=>NULL, "q\\""=>"x=>y", "é"=>""'""", "''"),
    "ltree": ("'a.b.c'", "''"),
    "int4range": ("'[1,10)'", "'empty'", "'(,5]'"),
    "numrange": ("'(1.50,2]'",),
    "tsrange": ("""'["0044-03-15 12:00:00 BC",infinity)'""",),
    "tstzrange": ("'[2013-07-01 10:00:00.5+02,)'",),
    "daterange": ("'[2013-01-01,2013-02-01]'",),
    "int4multirange": ("'{[1,3),[5,7)}'", "'{}'"),
    "tstzmultirange": ("'{[2013-01-01 10:00+02,2013-01-02 10:00+02)}'",),
    "inet": ("'10.0.0.1'", "'10.0.0.1/8'", "'2001:db8::/32'"),
    "cidr": ("'10.0.0.0/8'",),
    "macaddr": ("'08:00:2b:01:02:03'",),
    "macaddr8": ("'08:00:2b:01:02:03:04:05'",),
    "bit(1)": ("'1'", "'0'"),
    "bit(10)": ("'1000000001'", "'0000000000'"),
    "point": ("'(1.5,-2)'", "'(NaN,Infinity)'", "'(1e-30,0.1)'"),
    "line": ("'{1,2,3}'",),
    "lseg": ("'[(0,0),(1,1e20)]'",),
    "box": ("'((0,0),(1,1.5))'",),
    "path": ("'[(0,0),(1,1)]'", "'((0,0),(1,1),(2,0.1))'"),
    "polygon": ("'((0,0),(1,1),(2,0))'",),
    "circle": ("'<(0,0.1),1.5>'",),
    "tsvector": ("'a:1A fat:2B cat''s'", "''"),
    "tsquery": ("'fat & (cat | !rat)'",),
    "pg_lsn": ("'16/B374D848'",),
    "xid8": ("'18446744073709551615'",),
    "jsonpath": ("'$.a[*] ? (@ > 1)'",),
    "xid": ("'4294967295'",),
    "tid": ("'(1,2)'",),
    "pg_snapshot": ("'10:20:10,14,15'",),
    "aclitem": ("makeaclitem(10, 10, 'SELECT', false)",),
    '"char"': ("'x'",),
    "regclass": ("'pg_class'",),
    "regtype": ("'integer'",),
    "regproc": ("'pg_backend_pid'",),
    "regprocedure": ("'length(text)'",),
    "regoper": ("'pg_catalog.||/'",),
    "regoperator": ("'+(integer,integer)'",),
    "regrole": ("'pg_monitor'",),
    "regnamespace": ("'pg_catalog'",),
    "regconfig": ("'simple'",),
    "regdictionary": ("'simple'",),
    "regcollation": ("""'"C"'""",),
    "vector(3)": ("'[1,2.5,-3e10]'",),
    "halfvec(3)": ("'[1,2.5,-3]'",),
    "small": ("7",),
    "price": ("1.5",),
    "day": ("'0044-03-15 BC'", "'infinity'"),
    "stamp": ("'2013-01-01 10:00:00.5+00'",),
    "ints": ("'{1,NULL}'",),
    "positive[]": ("'{1,2}'",),
    "pair": ("""ROW(1, 'a"b,c')""",),
    "pair[]": ("ARRAY[ROW(1, 'a')::pair]",),
    "span": ("ROW(1, '1-2', '\\xff', '2013-01-02')",),
    "intervalrange": ("'[00:00:01,1 year 2 mons)'",),
    "floatrange": ("'[1,2.5)'",),
}
ROWS = max(map(len, VALUES.values())) + 1
"""The last row holds nothing but nulls."""


def column_name(type_: str) -> str:
    """The column of a type: an open table format takes no brackets and spaces in a name."""
    return re.sub(r"\W", "_", type_)


TABLES = {f"w{part}": list(VALUES)[part::4] for part in range(4)}
"""Four tables that are only as wide as tables are."""


def create() -> list[str]:
    """The statements that create the tables."""
    statements = []
    for table, types in TABLES.items():
        columns = ", ".join(f"{column_name(type_)} {type_}" for type_ in types)
        statements += [
            f"CREATE TABLE {table} (id int PRIMARY KEY, {columns})",
            f"ALTER TABLE {table} REPLICA IDENTITY FULL",
        ]
    return statements


def insert(first: int) -> list[str]:
    """The statements that insert all values, in rows from this id on."""

    def value(type_: str, row: int) -> str:
        values = VALUES[type_]
        return values[row] if row < len(values) else "NULL"

    return [
        f"INSERT INTO {table} VALUES ({first + row}, {', '.join(value(type_, row) for type_ in types)})"
        for table, types in TABLES.items()
        for row in range(ROWS)
    ]
