"""The codec: records of the log to changes, and rows in every form of a view. Plain Python over
bytes.

Neither Spark nor a server is needed. At a prompt,
`RecordDecoder([table], placeholder).decode(topic, key, value)` shows what a record says, and
`codec(table)` gives its row as a document and as columns of the warehouse.
"""
