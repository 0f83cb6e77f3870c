#include "base/library.h"

#include <dlfcn.h>
#include <string.h>

const char *dray__symbols_load(void *library, const dray__symbol *symbols, size_t count, void *out)
{
    for (size_t i = 0; i < count; i++) {
        void *found = dlsym(library, symbols[i].name);
        if (!found && !symbols[i].optional)
            return symbols[i].name;
        memcpy((char *)out + symbols[i].at, &found, sizeof found);
    }
    return NULL;
}
