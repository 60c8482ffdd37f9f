-- The flight of a plane before this one, for the view of planes that left late three times in a row.
CREATE INDEX flights_tailnum_dep_time ON public.flights (tailnum, dep_time);
