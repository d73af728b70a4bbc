"""The report: one self-contained HTML page made from event logs.

`thinwire.tools.report.page.write_report` makes it, `thinwire.tools.report.summary.summarise` computes its figures.
"""
