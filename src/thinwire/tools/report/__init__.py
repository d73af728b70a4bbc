"""The report: one self-contained HTML page from event logs.

`thinwire.tools.report.page.write_report` writes it; `thinwire.tools.report.summary.summarise` computes its figures.
"""
