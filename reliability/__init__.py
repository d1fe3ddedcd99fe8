"""Tools that try to break oases: mutations, a fault campaign, fuzzing; and fingerprints that compare two trees."""
