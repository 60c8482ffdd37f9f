UPDATE products SET price = 35.00 WHERE id = 1;
UPDATE customers SET name = 'Ann Berg' WHERE id = 1;
UPDATE items SET order_id = 2, line = 2 WHERE order_id = 3;
INSERT INTO product_tags VALUES (1, 2);
DELETE FROM orders WHERE id = 3;
INSERT INTO orders VALUES (4, 2, now(), 'open');
INSERT INTO items VALUES (4, 1, 1, 3);
UPDATE orders SET status = 'paid' WHERE id = 2;
