//go:build !race

package edgelimit

const raceDetector = false
