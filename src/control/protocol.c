#include "control/protocol.h"

#include <stddef.h>

const char *dray__message_name(uint16_t type)
{
    static const struct {
        uint16_t type;
        const char *name;
    } messages[] = {
#define XX(name, value) {value, #name},
        DRAY__MESSAGE_MAP(XX)
#undef XX
    };
    for (size_t i = 0; i < sizeof messages / sizeof *messages; i++)
        if (messages[i].type == type)
            return messages[i].name;
    return "?";
}
