"""The table of options: its entries, and the keywords' types made from them."""
