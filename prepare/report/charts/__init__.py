"""Charts of records, as SVG and PNG."""
