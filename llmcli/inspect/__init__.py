"""What commands that look inside a model share: passes, attention maps, recurrences, formulas."""
