SELECT withdraw(1, 30);
SELECT deposit(2, 5.50);
DO $$ BEGIN
    PERFORM withdraw(2, 100);                       -- refused: no event, and no change of a view
EXCEPTION WHEN raise_exception THEN
    RAISE NOTICE '%', SQLERRM;
END $$;
SELECT withdraw(2, 25.50);
