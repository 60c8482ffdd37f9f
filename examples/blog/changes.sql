UPDATE posts SET published = now() WHERE id = 2;
UPDATE authors SET name = 'Ann Berg' WHERE id = 1;
INSERT INTO comments VALUES (4, 2, 2, NULL, 'At last');
UPDATE comments SET is_spam = true WHERE id = 1;
DELETE FROM comments WHERE id = 2;
UPDATE comments SET post_id = 1, is_spam = false WHERE id = 3;
UPDATE posts SET published = NULL WHERE id = 3;
