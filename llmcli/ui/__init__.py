"""What views share: layout, theme, tables, heatmaps, PNG and HTML."""
