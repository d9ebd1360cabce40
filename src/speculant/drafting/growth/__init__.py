"""How draft models grow chains, trees and beams."""
