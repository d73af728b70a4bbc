"""The report: `page.write_report` makes one self-contained HTML page from event logs, `summary` its figures."""
