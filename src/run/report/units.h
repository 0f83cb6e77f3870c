/* Numbers as text for users. */
#pragma once

typedef struct dray__units {
    char s[32];
} dray__units;

dray__units dray__say_bytes(double bytes);     /* decimal units, three digits: "65.5 GB", "512 B" */
dray__units dray__say_seconds(double seconds); /* "12.3 ms", "1.50 s", "2 min 5 s" */
dray__units dray__say_count(double count);     /* "115 k", "32.8 G" */
