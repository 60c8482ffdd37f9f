-- What the desk asks for: the board of a day, and the flights of one plane.

CREATE INDEX flights_sched_dep ON public.flights (sched_dep);
CREATE INDEX flights_tailnum ON public.flights (tailnum, sched_dep) WHERE tailnum IS NOT NULL;
