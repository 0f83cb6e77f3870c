#include "base/spin.h"

#include "base/clock.h"

bool dray__spin_begin(dray__spin *spin, int64_t deadline_ns)
{
    if (spin->left) {
        spin->left--;
        return false;
    }
    spin->last_ns = dray__now();
    spin->until_ns = spin->last_ns + DRAY__SPIN_NS;
    return spin->until_ns < deadline_ns;
}

static bool put_off(const dray__spin *spin, int64_t now_ns)
{
    return now_ns - spin->last_ns > DRAY__SPIN_GAP_NS;
}

bool dray__spin_again(dray__spin *spin)
{
    int64_t now = dray__now();
    if (put_off(spin, now))
        return false;
    spin->last_ns = now;
    return now < spin->until_ns;
}

void dray__spin_end(dray__spin *spin, int64_t found_ns)
{
    if (found_ns && !put_off(spin, found_ns))
        spin->rest = 0;
    else if (spin->rest < DRAY__SPIN_REST)
        spin->rest = 2 * spin->rest + 1;
    spin->left = spin->rest;
}
