"""The state that documents are made from, in a database of Redis or Valkey."""
