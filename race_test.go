//go:build race

package edgelimit

// raceDetector empties pools at random, so that what they save is allocated.
const raceDetector = true
