"""The lab: emulated hosts with shaped links on one Linux machine."""
