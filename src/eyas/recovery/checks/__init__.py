"""What doctor looks at, one small file a check; nothing here changes anything."""
