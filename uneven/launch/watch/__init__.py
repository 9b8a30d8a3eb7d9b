"""Who is lost and why, whatever started the ranks; what a launcher does about it, and what ranks among themselves."""
