CREATE TABLE authors (id integer PRIMARY KEY, name text NOT NULL);
CREATE TABLE posts (id integer PRIMARY KEY, author_id integer NOT NULL, title text NOT NULL, body text NOT NULL, published timestamptz);
CREATE TABLE comments (id integer PRIMARY KEY, post_id integer NOT NULL, author_id integer, parent_id integer, body text NOT NULL, is_spam boolean NOT NULL DEFAULT false);
CREATE INDEX ON posts (author_id);
CREATE INDEX ON comments (post_id);

INSERT INTO authors VALUES (1, 'Ann'), (2, 'Bo');
INSERT INTO posts VALUES (1, 1, 'Logs', 'All you need', '2026-01-01 08:00+00'), (2, 1, 'Drafts', 'Not yet', NULL), (3, 2, 'Caches', 'Hard', '2026-01-02 08:00+00');
INSERT INTO comments VALUES (1, 1, 2, NULL, 'True', false), (2, 1, 1, 1, 'Thanks', false), (3, 3, NULL, NULL, 'Buy now', true);
