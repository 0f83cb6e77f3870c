/* The built-in files of families as one JSON object, by name, which cmake makes from
 * src/model/families/NAME.json. */
#pragma once

extern const unsigned char dray__families_json[];
extern const unsigned long dray__families_json_size;
