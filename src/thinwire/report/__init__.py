"""The report: one self-contained HTML page made from event logs.

`thinwire.report.page.write_report` makes it, `thinwire.report.summary.summarise` computes its figures.
"""
