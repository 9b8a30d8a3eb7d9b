"""The launcher's watch over rank processes: heartbeats, deadlines, who is lost, joins and leaves."""
