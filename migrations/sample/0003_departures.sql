-- The departures of an airport, the latest first: its board, and the query of `airport_docs`.

CREATE INDEX flights_origin ON public.flights (origin, sched_dep);
