-- The sample: New York's three airports in 2013, as an airline's operations desk would keep them.

CREATE TABLE public.airlines (
    carrier    text PRIMARY KEY,
    name       text NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE public.airports (
    faa        text PRIMARY KEY,
    name       text NOT NULL,
    lat        double precision NOT NULL,
    lon        double precision NOT NULL,
    alt        integer NOT NULL,
    tz         smallint NOT NULL,
    dst        text NOT NULL,
    tzone      text,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE public.planes (
    tailnum      text PRIMARY KEY,
    year         smallint,
    type         text NOT NULL,
    manufacturer text NOT NULL,
    model        text NOT NULL,
    engines      smallint NOT NULL,
    seats        smallint NOT NULL,
    speed        smallint,
    engine       text NOT NULL,
    updated_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE public.weather (
    origin     text NOT NULL,
    time_hour  timestamptz NOT NULL,
    temp       numeric(5, 2),
    dewp       numeric(5, 2),
    humid      numeric(5, 2),
    wind_dir   smallint,
    wind_speed numeric(9, 5),
    wind_gust  numeric(9, 5),
    precip     numeric(5, 2),
    pressure   numeric(6, 1),
    visib      numeric(5, 2),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (origin, time_hour)
);

-- No foreign keys: flights name planes and destinations that the other tables lack, as in life.
CREATE TABLE public.flights (
    carrier    text NOT NULL,
    flight     integer NOT NULL,
    origin     text NOT NULL,
    sched_dep  timestamptz NOT NULL,
    dest       text NOT NULL,
    tailnum    text,
    dep_time   timestamptz,
    dep_delay  smallint,
    sched_arr  timestamptz NOT NULL,
    arr_time   timestamptz,
    arr_delay  smallint,
    air_time   smallint,
    distance   integer NOT NULL,
    status     text NOT NULL CHECK (status IN ('scheduled', 'departed', 'arrived', 'cancelled')),
    remark     text,
    on_time    boolean,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (carrier, flight, origin, sched_dep)
);

-- Flights leave from three airports, but the board of each of 1,458 is asked for. Without this the planner expects a third
-- of all flights at every airport, and reads the whole table for each instead of the index (5.6 s for all boards; 0.3 s).
ALTER TABLE public.flights ALTER COLUMN origin SET (n_distinct = 1000);

-- What the desk asks for: the board of a day, and the flights of one plane.
CREATE INDEX flights_sched_dep ON public.flights (sched_dep);
CREATE INDEX flights_tailnum ON public.flights (tailnum, sched_dep) WHERE tailnum IS NOT NULL;
-- The departures of an airport, the latest first: its board, and the query of `airport_docs`.
CREATE INDEX flights_origin ON public.flights (origin, sched_dep);
-- Which flight brought a plane, for the view of flights that left late since their plane came late.
CREATE INDEX flights_tailnum_arr_time ON public.flights (tailnum, arr_time);
-- The flight of a plane before this one, for the view of planes that left late three times in a row.
CREATE INDEX flights_tailnum_dep_time ON public.flights (tailnum, dep_time);
