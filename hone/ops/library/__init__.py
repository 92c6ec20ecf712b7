"""Ways made of library calls, torch's or the vendor's, behind the signatures of hone's own."""
