CREATE TABLE accounts (id integer PRIMARY KEY, owner text NOT NULL, balance numeric(12,2) NOT NULL DEFAULT 0);
CREATE TABLE account_events (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    account_id integer NOT NULL REFERENCES accounts,
    kind text NOT NULL,
    amount numeric(12,2) NOT NULL,
    at timestamptz NOT NULL DEFAULT now());
CREATE INDEX ON account_events (account_id);

-- Commands. Each one is refused, or becomes an event; the row of the account is locked meanwhile.
CREATE FUNCTION deposit(account integer, amount numeric) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE accounts SET balance = balance + amount WHERE id = account;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no account %', account;
    END IF;
    INSERT INTO account_events (account_id, kind, amount) VALUES (account, 'deposited', amount);
END $$;
CREATE FUNCTION withdraw(account integer, amount numeric) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE accounts SET balance = balance - amount WHERE id = account AND balance >= amount;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'account % doesn''t have %', account, amount;
    END IF;
    INSERT INTO account_events (account_id, kind, amount) VALUES (account, 'withdrawn', -amount);
END $$;

INSERT INTO accounts VALUES (1, 'Ann'), (2, 'Bo');
SELECT deposit(1, 100), deposit(2, 20);
