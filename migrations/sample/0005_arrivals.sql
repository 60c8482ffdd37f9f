-- Which flight brought a plane, for the view of flights that left late since their plane came late.
CREATE INDEX flights_tailnum_arr_time ON public.flights (tailnum, arr_time);
