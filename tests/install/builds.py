"""What a package index answers."""

ANSWER = '{"installed": true, "version": "2.13.0+cu126", "cuda": "12.6", "hip": null, "archs": ["sm_50"]}'
