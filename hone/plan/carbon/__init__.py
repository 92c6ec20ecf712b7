"""When and where jobs run: hours and sites of little carbon or price, before their deadlines."""
