CREATE TABLE customers (id integer PRIMARY KEY, name text NOT NULL, city text);
CREATE TABLE products (id integer PRIMARY KEY, name text NOT NULL, price numeric(10, 2) NOT NULL);
CREATE TABLE tags (id integer PRIMARY KEY, name text NOT NULL);
CREATE TABLE product_tags (product_id integer, tag_id integer, PRIMARY KEY (product_id, tag_id));
CREATE TABLE orders (id integer PRIMARY KEY, customer_id integer, placed timestamptz NOT NULL, status text NOT NULL);
CREATE TABLE items (order_id integer, line smallint, product_id integer, quantity integer NOT NULL, PRIMARY KEY (order_id, line));
CREATE INDEX ON orders (customer_id);
CREATE INDEX ON items (product_id);

INSERT INTO customers VALUES (1, 'Ann', 'Oslo'), (2, 'Bo Li', NULL);
INSERT INTO products VALUES (1, 'Desk lamp', 39.90), (2, 'Lamp shade', 9.50), (3, 'Desk', 249.00);
INSERT INTO tags VALUES (1, 'light'), (2, 'wood');
INSERT INTO product_tags VALUES (1, 1), (2, 1), (3, 2);
INSERT INTO orders VALUES (1, 1, '2026-01-05 10:00+00', 'paid'), (2, 2, '2026-01-06 11:30+00', 'open'), (3, 1, '2026-01-07 09:15+00', 'open');
INSERT INTO items VALUES (1, 1, 1, 2), (1, 2, 2, 1), (2, 1, 3, 1), (3, 1, 2, 4);
