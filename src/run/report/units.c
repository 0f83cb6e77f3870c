#include "run/report/units.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>

/* Three digits for any size: 1.23, 12.3, 123. */
static dray__units three_digits(double value, const char *unit)
{
    dray__units text;
    double size = fabs(value);
    int decimals = size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
    snprintf(text.s, sizeof(text.s), "%.*f %s", decimals, value, unit);
    return text;
}

static dray__units scaled(double value, const char *const *units, size_t count)
{
    size_t i = 0;
    dray__units text;
    for (; fabs(value) >= 999.5 && i + 1 < count; i++)
        value /= 1000;
    if (i > 0)
        return three_digits(value, units[i]);
    snprintf(text.s, sizeof(text.s), "%.0f%s%s", value, units[0][0] ? " " : "", units[0]);
    return text;
}

dray__units dray__say_bytes(double bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    return scaled(bytes, units, sizeof(units) / sizeof(units[0]));
}

dray__units dray__say_count(double count)
{
    static const char *const units[] = {"", "k", "M", "G", "T"};
    return scaled(count, units, sizeof(units) / sizeof(units[0]));
}

dray__units dray__say_seconds(double seconds)
{
    dray__units text;
    if (seconds < 999.5e-9)
        return three_digits(seconds * 1e9, "ns");
    if (seconds < 999.5e-6)
        return three_digits(seconds * 1e6, "us");
    if (seconds < 999.5e-3)
        return three_digits(seconds * 1e3, "ms");
    if (seconds < 99.95)
        return three_digits(seconds, "s");
    uint64_t whole = (uint64_t)(seconds + 0.5);
    if (whole < 3600)
        snprintf(text.s, sizeof(text.s), "%u min %u s", (unsigned)(whole / 60),
                 (unsigned)(whole % 60));
    else
        snprintf(text.s, sizeof(text.s), "%lu h %u min", (unsigned long)(whole / 3600),
                 (unsigned)(whole / 60 % 60));
    return text;
}
